"""The public contract. `pellucid.v1` holds the .proto files and their generated code; `make proto` regenerates it."""

__version__ = "0.1.0"
