"""From token ids to what a reader sees: whole characters, stop strings."""

from pellucid_server.text.stream import Delta, TextStream

__all__ = ["Delta", "TextStream"]
