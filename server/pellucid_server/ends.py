"""How a sequence, or a whole request, came to its end."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid_server.errors import ServeError


@dataclass(frozen=True)
class End:
    """`error` where the call does not end OK; `at` is on the monotonic clock."""

    reason: str
    at: float
    error: ServeError | None = None
    matched_token_id: int | None = None
    matched_stop_string: str | None = None
