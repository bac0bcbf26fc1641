"""How long tokens gather before a stream's next message, by how many streams there are.

A message costs its server and its reader many times what a token does, and tokens that come faster than anybody could
see can share one. So messages of a stream keep a gap of a frame of a display, which grows with the streams until it is
as long as three. In come streams, as they begin and end, and steps; out goes when a message may begin.
"""

from __future__ import annotations

SHORTEST_GAP = 0.016
LONGEST_GAP = 0.05
"""Seconds from one message of a stream to the next."""
MESSAGES_PER_SECOND = 160
"""Of all streams together, between the shortest gap and the longest."""


def message_gap(streams: int) -> float:
    """Seconds for which what comes for so many streams may gather. An answer in one message is none."""
    return min(LONGEST_GAP, max(SHORTEST_GAP, streams / MESSAGES_PER_SECOND))


class Pace:
    """Of all streams of one server that leave it to the server. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.streams = 0
        """Those whose first message is out and whose end is not known yet."""
        self.due = 0.0
        """Gaps that end before this moment end with the last step: it is nearer to their end than the next one is."""
        self._stepped_at = 0.0
        self._interval = 0.0
        """Between the last two reports, each of one step or several."""

    @property
    def gap(self) -> float:
        """Seconds."""
        return message_gap(self.streams)

    def gap_end(self, now: float) -> float:
        """Up to when tokens gather behind a message that begins now.

        It is the same moment for all streams, whenever their last messages began: writing to many at a time is cheaper,
        and so is reading. A message that went a little before that moment, with the step that was nearest, counts as
        sent at it: else the next step, behind it, would bring another one.
        """
        gap = self.gap
        return (max(now, self.due) // gap + 1) * gap

    def step(self, at: float) -> None:
        """A step's tokens are about to come. One that took longer does not mean that the next one will."""
        before, self._interval = self._interval, at - self._stepped_at
        self._stepped_at = at
        self.due = at + max(SHORTEST_GAP, min(before, self._interval)) / 2
