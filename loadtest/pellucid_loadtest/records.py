"""What is kept of every request: its times and token counts as they were seen, nothing rounded.

Times are seconds since the Unix epoch that never run backwards, and the processes of one machine agree on them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

OK = "OK"
UNFINISHED = "UNFINISHED"
"""Still running when the drain ended, or when its user was taken away; cancelled by the load test."""
UNSENT = "UNSENT"
"""Arrived, and found no free user before the drain ended."""

_EPOCH = time.time() - time.perf_counter()


def now() -> float:
    return _EPOCH + time.perf_counter()


@dataclass(frozen=True)
class Record:
    """One request.

    arrival        when it was due: the same as `sent` in a closed loop
    code           OK, UNFINISHED, UNSENT, or the name of a gRPC status code
    reason         the server's ErrorInfo reason, "" where there is none
    message        the error's text, "" where there is none
    prompt_tokens  tokens of the prompt as sent
    token_times    [M] when each message with tokens came
    token_counts   [M] how many tokens it held
    """

    index: int
    arrival: float
    sent: float
    ended: float
    code: str
    reason: str
    message: str
    prompt_tokens: int
    clipped: bool
    token_times: tuple[float, ...] = ()
    token_counts: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return self.code == OK

    @property
    def failed(self) -> bool:
        return self.code not in (OK, UNFINISHED, UNSENT)

    @property
    def output_tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def e2e(self) -> float:
        """Arrival to the end of the stream, in seconds."""
        return self.ended - self.arrival

    @property
    def ttft(self) -> float | None:
        """Arrival to the first message with a token; None where none came."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """First token to last token over the tokens after the first message; None where there are none."""
        later = sum(self.token_counts[1:])
        return (self.token_times[-1] - self.token_times[0]) / later if later else None

    @property
    def itl(self) -> list[float]:
        """[M - 1] gaps between messages with tokens."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def dispatch_delay(self) -> float:
        """How long it waited here for a free user."""
        return self.sent - self.arrival


def packed(records: Sequence[Record]) -> list[list[Any]]:
    """Records as lists, for the way from a worker process to the master."""
    return [list(astuple(record)) for record in records]


def unpacked(rows: Sequence[Sequence[Any]]) -> list[Record]:
    return [replace(Record(*row), token_times=tuple(row[-2]), token_counts=tuple(row[-1])) for row in rows]
