"""From token ids to what a reader sees: whole characters, stop strings."""
