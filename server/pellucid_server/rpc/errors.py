"""From the exception tree of `pellucid_server.errors` to gRPC statuses with google.rpc details: the only such place."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from pellucid_server import errors

DOMAIN = "pellucid"

_CODES: dict[type[errors.ServeError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.RequestIdInUse: grpc.StatusCode.ALREADY_EXISTS,
    errors.RequestTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SlowConsumer: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}

Metadata = tuple[tuple[str, str | bytes], ...]


def status_code(error: errors.ServeError) -> grpc.StatusCode:
    """The code of the nearest ancestor in the tree."""
    for kind in type(error).__mro__:
        if issubclass(kind, errors.ServeError) and kind in _CODES:
            return _CODES[kind]
    return grpc.StatusCode.INTERNAL


def known_errors() -> list[tuple[str, str]]:
    """Code and reason of every error that the tree holds."""
    kinds = list(errors.ServeError.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
    found = {(_CODES[parent].name, kind.reason) for kind in kinds for parent in kind.__mro__[:-1] if parent in _CODES}
    return sorted((code, reason) for code, reason in found if reason != errors.ServeError.reason)


def error_trailers(error: errors.ServeError) -> Metadata:
    """Trailing metadata: the google.rpc.Status with its details and, where a retry makes sense, gRPC's own pushback."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.violations:
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
                    for v in error.violations
                ]
            )
        )
    trailers: Metadata = ()
    if error.retry_after is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        trailers = (("grpc-retry-pushback-ms", str(round(error.retry_after * 1000))),)
    status = status_pb2.Status(
        code=status_code(error).value[0], message=error.message, details=[_pack(d) for d in details]
    )
    return (("grpc-status-details-bin", status.SerializeToString()), *trailers)


def _pack(detail: Message) -> Any:
    packed = Any()
    packed.Pack(detail)
    return packed
