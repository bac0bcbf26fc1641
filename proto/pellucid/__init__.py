"""Generated code of the public contract. The sources are the .proto files beside it; `make proto` regenerates."""
