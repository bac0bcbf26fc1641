"""Threads for tokenizing and detokenizing, so that a long text never holds up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pellucid_server.errors import QueueFull

T = TypeVar("T")

THREADS = 2


class TextPool:
    """A small pool with a bound on what waits for it."""

    def __init__(self, max_pending: int) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._max_pending = max_pending
        self._pending = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises QueueFull where too much waits already."""
        if not self._pending < self._max_pending:
            raise QueueFull(f"{self._max_pending} texts are waiting to be tokenized; try again later")
        self._pending += 1
        future = self._executor.submit(work)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._pending -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
