"""Every exception that the client raises, and the one place where a gRPC failure becomes one of them.

    PellucidError
    ├── InvalidRequest            a field is wrong: `violations` names each one
    │   └── PromptTooLong         the prompt does not fit the model's context
    ├── ModelNotFound
    ├── RequestIdInUse            another request in flight has this id
    ├── ResourceExhausted
    │   ├── Overloaded            the queue is full: try again after `retry_after` seconds
    │   ├── RequestTooLarge       it can never run here, or is larger than a message may be
    │   └── SlowConsumer          the stream was read too slowly
    ├── Unavailable               loading, draining or restarting: try again after `retry_after` seconds
    │   └── ConnectionFailed      no server answers at the address, or the connection broke
    ├── DeadlineExceeded          `timeout` passed
    ├── Cancelled                 the call was cancelled on this side
    ├── ClientClosed              close() was called before
    ├── Unauthenticated
    ├── PermissionDenied
    └── InternalError             the server failed; `metadata` holds the request's id where it is known

In: a gRPC error of either API, sync or asyncio. Out: a PellucidError that keeps its code, reason and details.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pellucid_client.results import to_seconds

DOMAIN = "pellucid"


@dataclass(frozen=True)
class Violation:
    """One field that the server does not accept."""

    field: str
    """Path in the request message, such as "sampling.temperature"."""
    description: str
    """The value and the accepted range."""

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class PellucidError(Exception):
    """A call failed.

    code         the gRPC status code
    reason       the server's reason, such as "QUEUE_FULL"; None where it gave none
    metadata     what the server added to the reason, such as the request's id
    violations   fields that were refused
    retry_after  seconds after which the server expects to do better; None where it does not say
    details      the google.rpc details as they came
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        violations: tuple[Violation, ...] = (),
        retry_after: float | None = None,
        details: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.violations = violations
        self.retry_after = retry_after
        self.details = details


class InvalidRequest(PellucidError):
    """A field is wrong, unknown to this server, or missing."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model's context."""


class ModelNotFound(PellucidError):
    """The server has no model of this name."""


class RequestIdInUse(PellucidError):
    """Another request in flight has this id."""


class ResourceExhausted(PellucidError):
    """A limit was reached."""


class Overloaded(ResourceExhausted):
    """As many requests as the server takes are running and waiting."""


class RequestTooLarge(ResourceExhausted):
    """The request can never run on this server, or its message is larger than either side accepts."""


class SlowConsumer(ResourceExhausted):
    """The stream was read so slowly that the server gave it up."""


class Unavailable(PellucidError):
    """The server cannot take the request now."""


class ConnectionFailed(Unavailable):
    """No server answers at the address, or the connection broke."""


class DeadlineExceeded(PellucidError):
    """The call's timeout passed."""


class Cancelled(PellucidError):
    """The call was cancelled on this side."""


class ClientClosed(PellucidError):
    """The client was closed before the call."""

    def __init__(self, address: str) -> None:
        message = f"this client of {address} is closed; make another"
        super().__init__(message, code=grpc.StatusCode.FAILED_PRECONDITION)


class Unauthenticated(PellucidError):
    """The server wants credentials, or does not know these."""


class PermissionDenied(PellucidError):
    """The credentials do not allow this."""


class InternalError(PellucidError):
    """The server failed."""


_BY_REASON: dict[str, type[PellucidError]] = {
    "PROMPT_TOO_LONG": PromptTooLong,
    "QUEUE_FULL": Overloaded,
    "TENANT_QUOTA": Overloaded,
    "REQUEST_TOO_LARGE": RequestTooLarge,
    "SLOW_CONSUMER": SlowConsumer,
}

_BY_CODE: dict[grpc.StatusCode, type[PellucidError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.ALREADY_EXISTS: RequestIdInUse,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNKNOWN: InternalError,
    grpc.StatusCode.DATA_LOSS: InternalError,
}


class _FailedCall(Protocol):
    """What the errors of grpc and grpc.aio have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...


def error_from_rpc(error: grpc.RpcError, address: str, passed: float | None = None) -> PellucidError:
    """The exception for a failed call to the server at `address`; `passed` is its timeout where that has passed."""
    failed = cast("_FailedCall", error)
    code, message = failed.code(), failed.details() or ""
    details = _status_details(error)

    info, violations, retry_after = error_details_pb2.ErrorInfo(), [], None
    for detail in details:
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations += [Violation(each.field, each.description) for each in bad_request.field_violations]
        elif detail.Unpack(retry):
            retry_after = to_seconds(retry.retry_delay)
        else:
            detail.Unpack(info)

    reason = info.reason or None
    kind = _kind(code, reason, message)
    if kind is ConnectionFailed:
        message = f"no connection to the server at {address}: {_connection_failure(message)}"
    if kind is DeadlineExceeded and passed is not None:
        message = f"timeout: {passed:g} s passed before the call was done"
    return kind(
        message or code.name,
        code=code,
        reason=reason,
        metadata=info.metadata,
        violations=tuple(violations),
        retry_after=retry_after,
        details=details,
    )


def _kind(code: grpc.StatusCode, reason: str | None, message: str) -> type[PellucidError]:
    if reason in _BY_REASON:
        return _BY_REASON[reason]
    if reason is None and code is grpc.StatusCode.UNAVAILABLE:
        return ConnectionFailed  # gRPC's own: a Pellucid server always gives a reason.
    if reason is None and code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return RequestTooLarge  # gRPC's own limit on messages, on either side.
    return _BY_CODE.get(code, PellucidError)


def _connection_failure(message: str) -> str:
    """The reason in gRPC's own text, which tells the whole way there ("failed to connect to all addresses; last error:
    …: …: reason")."""
    if "handshake failed" in message:
        return "the TLS handshake failed: " + message.rpartition("OPENSSL_internal:")[2].removesuffix(": OK")
    reason = message.rpartition(": ")[2]
    if "[" not in reason:
        reason = reason.removesuffix("]")  # The end of a list that began further up.
    hung_up = reason == "Socket closed" and "failed to connect" in message
    return f"{reason}; it may want TLS or a client certificate" if hung_up else reason


def _status_details(error: grpc.RpcError) -> tuple[Any, ...]:
    try:
        status = rpc_status.from_call(cast("grpc.Call", error))
    except ValueError:  # The trailer contradicts the status; the status is what counts.
        return ()
    return () if status is None else tuple(status.details)
