"""When an engine counts as hung: it has been silent for too long.

A working engine reports its steps; an idle one answers a ping. How long is too long: the operator's limit, or ten
times the longest step so far where that is more, the warm-up's included, so that a large model on a slow machine is
left to its work. Silence is counted in this process's own ticks: time in which the frontend itself stood still, as
under SIGSTOP or in a frozen container, is nobody's silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

START_SECONDS = 3600.0
"""How long an engine may take to load its model."""
PATIENCE = 10.0
"""Times the longest step."""
TICKS = 10
"""Per limit; the first silent one pings."""


class Watchdog:
    """Over one engine's life. `limit`: seconds; 0: it watches the start only."""

    def __init__(self, limit: float, ping: Callable[[], None], start_limit: float = START_SECONDS) -> None:
        self._limit = limit
        self._start_limit = start_limit
        self._ping = ping
        self._longest_step = 0.0
        self._is_up = False
        self._silent = 0.0
        self._heard = False

    def engine_up(self, warm_up_seconds: float) -> None:
        self._is_up = True
        self._longest_step = warm_up_seconds
        self.hear()

    def hear(self, step_seconds: float = 0.0) -> None:
        """The engine has said something."""
        self._longest_step = max(self._longest_step, step_seconds)
        self._heard = True

    async def until_hung(self) -> float:
        """Returns the seconds of silence once there are too many."""
        while True:
            tick = self._tick()
            await asyncio.sleep(tick)
            heard, self._heard = self._heard, False
            if heard or (self._is_up and not self._limit):
                self._silent = 0.0
                continue
            if not self._silent and self._is_up:
                self._ping()
            self._silent += tick
            if self._silent >= self._patience():
                return self._silent

    def _patience(self) -> float:
        if not self._is_up:
            return self._start_limit
        return max(self._limit, PATIENCE * self._longest_step)

    def _tick(self) -> float:
        """A part of the shorter limit, but no more often than makes sense."""
        return max(0.01, min(self._limit or self._start_limit, self._start_limit) / TICKS)
