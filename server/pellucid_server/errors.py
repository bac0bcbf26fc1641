"""What can go wrong with a call, as one tree. `rpc/errors.py` turns it into gRPC statuses; nothing else does.

ServeError
├── InvalidRequest            INVALID_ARGUMENT     the request itself; lists every violation
│   ├── UnsupportedField                           a field this server does not know or this model cannot serve
│   └── PromptTooLong                              more tokens than the trained context
├── ModelNotFound             NOT_FOUND
├── RequestIdInUse            ALREADY_EXISTS
├── RequestTooLarge           RESOURCE_EXHAUSTED   can never fit into the KV cache
├── QueueFull                 RESOURCE_EXHAUSTED   may be retried
├── SlowConsumer              RESOURCE_EXHAUSTED   the client did not read its stream
├── Unavailable               UNAVAILABLE          may be retried
│   ├── Draining
│   ├── ModelLoading
│   └── EngineDown
├── DeadlineExceeded          DEADLINE_EXCEEDED
├── Unauthenticated           UNAUTHENTICATED
│   ├── TokenMissing                               the server wants a token
│   └── TokenInvalid                               it does not know this one
└── InternalError             INTERNAL             says the request id and nothing of the inside
    └── NonFiniteLogits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One refused field: its path in the request, and what is wrong with the value and which ones are accepted."""

    field: str
    description: str


class ServeError(Exception):
    """Base of everything a call may be answered with instead of OK."""

    reason = "UNKNOWN"
    """The ErrorInfo reason, part of the public API."""
    retry_after: float | None = None
    """Seconds after which a retry makes sense; None: it does not."""
    violations: Sequence[Violation] = ()

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(ServeError):
    reason = "INVALID_FIELD"

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations[:8]) + _more(len(violations) - 8))
        self.violations = violations


class UnsupportedField(InvalidRequest):
    reason = "UNSUPPORTED_FIELD"


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"


class ModelNotFound(ServeError):
    reason = "MODEL_NOT_FOUND"


class RequestIdInUse(ServeError):
    reason = "REQUEST_ID_IN_USE"


class RequestTooLarge(ServeError):
    reason = "REQUEST_TOO_LARGE"


class QueueFull(ServeError):
    reason = "QUEUE_FULL"
    retry_after = 0.5


class SlowConsumer(ServeError):
    reason = "SLOW_CONSUMER"


class Unavailable(ServeError):
    retry_after = 1.0


class Draining(Unavailable):
    reason = "DRAINING"


class ModelLoading(Unavailable):
    reason = "MODEL_LOADING"


class EngineDown(Unavailable):
    reason = "ENGINE_DOWN"


class DeadlineExceeded(ServeError):
    reason = "DEADLINE_EXCEEDED"


class Unauthenticated(ServeError):
    pass


class TokenMissing(Unauthenticated):
    reason = "TOKEN_MISSING"


class TokenInvalid(Unauthenticated):
    reason = "TOKEN_INVALID"


class InternalError(ServeError):
    reason = "ENGINE_ERROR"


class NonFiniteLogits(InternalError):
    reason = "NON_FINITE_LOGITS"


class StartError(Exception):
    """The server cannot start. Its text is one line for the operator: what is wrong and what to do."""


def _more(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""
