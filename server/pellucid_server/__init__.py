"""The server: a torch-free frontend (rpc, text, metrics) and an engine process (scheduler, KV blocks, model steps)."""
