"""Statuses and google.rpc details of the whole exception tree."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.rpc import error_details_pb2, status_pb2

from pellucid_server import errors
from pellucid_server.rpc.errors import error_trailers, status_code

VIOLATIONS = [errors.Violation("a.b", "is wrong"), errors.Violation("c", "is worse")]


def details(error: errors.ServeError) -> tuple[status_pb2.Status, dict[str, Packed], dict[str, str | bytes]]:
    trailers = dict(error_trailers(error))
    status = status_pb2.Status.FromString(bytes(trailers["grpc-status-details-bin"]))  # type: ignore[arg-type]
    return status, {detail.type_url.rsplit(".", 1)[1]: detail for detail in status.details}, trailers


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (errors.InvalidRequest(VIOLATIONS), "INVALID_ARGUMENT", "INVALID_FIELD"),
        (errors.UnsupportedField(VIOLATIONS), "INVALID_ARGUMENT", "UNSUPPORTED_FIELD"),
        (errors.PromptTooLong(VIOLATIONS), "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
        (errors.ModelNotFound("x"), "NOT_FOUND", "MODEL_NOT_FOUND"),
        (errors.RequestIdInUse("x"), "ALREADY_EXISTS", "REQUEST_ID_IN_USE"),
        (errors.RequestTooLarge("x"), "RESOURCE_EXHAUSTED", "REQUEST_TOO_LARGE"),
        (errors.QueueFull("x"), "RESOURCE_EXHAUSTED", "QUEUE_FULL"),
        (errors.SlowConsumer("x"), "RESOURCE_EXHAUSTED", "SLOW_CONSUMER"),
        (errors.Draining("x"), "UNAVAILABLE", "DRAINING"),
        (errors.ModelLoading("x"), "UNAVAILABLE", "MODEL_LOADING"),
        (errors.EngineDown("x"), "UNAVAILABLE", "ENGINE_DOWN"),
        (errors.DeadlineExceeded("x"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        (errors.InternalError("x"), "INTERNAL", "ENGINE_ERROR"),
        (errors.NonFiniteLogits("x"), "INTERNAL", "NON_FINITE_LOGITS"),
    ],
)
def test_codes_and_details(error: errors.ServeError, code: str, reason: str) -> None:
    assert status_code(error) is grpc.StatusCode[code]
    status, found, trailers = details(error)
    assert status.code == grpc.StatusCode[code].value[0]
    assert status.message == error.message
    info = error_details_pb2.ErrorInfo()
    found["ErrorInfo"].Unpack(info)
    assert (info.reason, info.domain) == (reason, "pellucid")
    assert ("BadRequest" in found) is (code == "INVALID_ARGUMENT")
    may_retry = code == "UNAVAILABLE" or reason == "QUEUE_FULL"
    assert ("RetryInfo" in found) is may_retry
    assert ("grpc-retry-pushback-ms" in trailers) is may_retry


def test_every_class_of_the_tree_has_a_code_and_is_drawn() -> None:
    kinds: list[Any] = [errors.ServeError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    for kind in kinds:
        assert kind.__name__ in str(errors.__doc__)
        if not kind.__subclasses__():
            error = kind(VIOLATIONS) if issubclass(kind, errors.InvalidRequest) else kind("x")
            assert error.reason != "UNKNOWN"
            assert status_code(error) is not grpc.StatusCode.UNKNOWN


def test_violations_are_listed() -> None:
    _, found, _ = details(errors.InvalidRequest(VIOLATIONS))
    bad = error_details_pb2.BadRequest()
    found["BadRequest"].Unpack(bad)
    assert [(v.field, v.description) for v in bad.field_violations] == [("a.b", "is wrong"), ("c", "is worse")]


def test_retry_delays_agree() -> None:
    _, found, trailers = details(errors.QueueFull("x"))
    info = error_details_pb2.RetryInfo()
    found["RetryInfo"].Unpack(info)
    assert info.retry_delay.ToMilliseconds() == int(str(trailers["grpc-retry-pushback-ms"])) == 500


def test_many_violations_fit_into_trailers() -> None:
    many = [errors.Violation(f"sampling.field {i}", "is not known to this server; leave it out") for i in range(16)]
    error = errors.UnsupportedField(many)
    assert sum(len(value) for _, value in error_trailers(error)) * 4 / 3 + len(error.message) < 6000
