"""Who owns which KV block. Pure Python, no torch."""
