"""Which failed calls are tried again, and when.

Only UNAVAILABLE, and of a stream only before its first message: from then on a second attempt could say other things
than the first. The server's pushback decides how long to wait, else an exponential backoff with jitter. A call's
timeout covers all of its attempts, and an attempt that could not start in time is not waited for.

A caller may also choose to wait for room in a server that is full. Such attempts are not counted; the server's pushback
is then the least wait, which grows with each attempt and has jitter, so that many callers do not come back at once.

The rules are gRPC's own (proposal A6), which a retryPolicy in the service config would bring. It is not used because
in grpcio up to 1.85 it can leave a synchronous stream waiting for ever, past its deadline, when the connection breaks
before the first message and the last attempt cannot connect.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from typing import Any, cast

import grpc

from pellucid_client.errors import InvalidRequest, Overloaded, PellucidError, Violation

DEFAULT_ATTEMPTS = 3
PUSHBACK = "grpc-retry-pushback-ms"
FIRST_BACKOFF = 0.1
"""Seconds; doubled after each attempt."""
MAX_BACKOFF = 2.0
JITTER = 0.2
LONGEST = 27_000 * 3600.0
"""Seconds; gRPC's longest deadline, three years. It fails calls whose deadline is much longer."""
SLACK = 0.05
"""Seconds by which gRPC, whose clock is coarser, may see a deadline earlier."""


class Deadline:
    """When a call must be done.

    timeout  seconds; None, and more than LONGEST: no limit

    Raises InvalidRequest where it is not greater than 0.
    """

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise _refused(timeout)
        self._timeout = timeout
        self._end = None if timeout is None or timeout > LONGEST else time.monotonic() + timeout

    def remaining(self) -> float | None:
        """Seconds until then; None: there is no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def passed(self) -> float | None:
        """The timeout as it was given, where it has passed; else None."""
        return self._timeout if self._end is not None and time.monotonic() > self._end - SLACK else None


class Retries(Deadline):
    """The attempts and the seconds that are left to one call.

    attempts       at the most, the first included
    timeout        seconds for all of them together; None: no limit
    wait_for_room  try again, and do not count it, while the server is full
    """

    def __init__(self, attempts: int, timeout: float | None, *, wait_for_room: bool = False) -> None:
        super().__init__(timeout)
        self._left = attempts - 1
        self._made = 0
        self._wait_for_room = wait_for_room

    def delay(self, error: grpc.RpcError, failure: PellucidError) -> float | None:
        """Seconds to wait before the next attempt, which is then counted; None: `failure` is final."""
        full = self._wait_for_room and isinstance(failure, Overloaded)
        if not full and (failure.code is not grpc.StatusCode.UNAVAILABLE or self._left <= 0):
            return None
        pushback, remaining = _pushback(error, failure), self.remaining()
        if pushback is None:
            delay = self._backoff() * random.uniform(1 - JITTER, 1 + JITTER)
        else:
            delay = max(pushback, self._backoff()) * random.uniform(1, 1 + 2 * JITTER) if full else pushback
        if delay >= (LONGEST if remaining is None else remaining):
            return None
        self._left -= 0 if full else 1
        self._made += 1
        return delay

    def _backoff(self) -> float:
        doublings = min(self._made, 10)  # Bounded, since waiting for room may go on for ever.
        return min(FIRST_BACKOFF * 2.0**doublings, MAX_BACKOFF)


def check_attempts(attempts: int) -> int:
    """Raises ValueError where `attempts` is not a count from 1 on."""
    if attempts < 1:
        raise ValueError(f"attempts: {attempts} is not in [1, …]; 1 = never try again")
    return attempts


def _refused(timeout: object) -> InvalidRequest:
    violation = Violation("timeout", f"{timeout!r} is not accepted; accepted: a number of seconds greater than 0")
    return InvalidRequest(
        str(violation), code=grpc.StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD", violations=(violation,)
    )


def _pushback(error: grpc.RpcError, failure: PellucidError) -> float | None:
    """Seconds that the server asks to wait; infinitely many for "do not try again"; None where it says nothing."""
    trailers: Iterable[tuple[str, str | bytes]] = cast("Any", error).trailing_metadata() or ()
    for key, value in trailers:
        if key == PUSHBACK:
            return float(value) / 1000 if isinstance(value, str) and value.isdecimal() else math.inf
    return failure.retry_after
