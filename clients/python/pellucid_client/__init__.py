"""Client of a Pellucid server."""

__version__ = "0.1.0"
