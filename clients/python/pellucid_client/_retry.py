"""Which failed calls are tried again, and when.

Only UNAVAILABLE, and of a stream only before its first message: from then on a second attempt could say other things
than the first. The server's pushback decides how long to wait, else an exponential backoff with jitter. A call's
timeout covers all of its attempts, and an attempt that could not start in time is not waited for.

The rules are gRPC's own (proposal A6), which a retryPolicy in the service config would bring. It is not used because
in grpcio up to 1.85 it can leave a synchronous stream waiting for ever, past its deadline, when the connection breaks
before the first message and the last attempt cannot connect.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any, cast

import grpc

from pellucid_client.errors import PellucidError

DEFAULT_ATTEMPTS = 3
PUSHBACK = "grpc-retry-pushback-ms"
FIRST_BACKOFF = 0.1
"""Seconds; doubled after each attempt."""
MAX_BACKOFF = 2.0
JITTER = 0.2


class Retries:
    """The attempts and the seconds that are left to one call.

    attempts  at the most, the first included
    timeout   seconds for all of them together; None: no limit
    """

    def __init__(self, attempts: int, timeout: float | None) -> None:
        self._left = attempts - 1
        self._made = 0
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay(self, error: grpc.RpcError, failure: PellucidError) -> float | None:
        """Seconds to wait before the next attempt, which is then counted; None: `failure` is final."""
        if failure.code is not grpc.StatusCode.UNAVAILABLE or self._left <= 0:
            return None
        delay = self._wait(_pushback(error), failure.retry_after)
        remaining = self.remaining()
        if delay is None or (remaining is not None and delay >= remaining):
            return None
        self._left -= 1
        self._made += 1
        return delay

    def _wait(self, pushback: str | None, retry_after: float | None) -> float | None:
        if pushback is not None:
            return int(pushback) / 1000 if pushback.isdecimal() else None  # Anything else means: do not try again.
        if retry_after is not None:
            return retry_after
        backoff: float = min(FIRST_BACKOFF * 2**self._made, MAX_BACKOFF)
        return backoff * random.uniform(1 - JITTER, 1 + JITTER)


def check_attempts(attempts: int) -> int:
    """Raises ValueError where `attempts` is not a count from 1 on."""
    if attempts < 1:
        raise ValueError(f"attempts: {attempts} is not in [1, …]; 1 = never try again")
    return attempts


def _pushback(error: grpc.RpcError) -> str | None:
    """The server's word on retries: milliseconds, or anything else for "no"."""
    trailers: Iterable[tuple[str, str | bytes]] = cast("Any", error).trailing_metadata() or ()
    for key, value in trailers:
        if key == PUSHBACK:
            return value if isinstance(value, str) else ""
    return None
