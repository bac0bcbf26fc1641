"""The gRPC edge: validation, servicers, errors, health."""
