"""The commands of `pellucid` that talk to a server, each a function from parsed arguments to an exit code."""
