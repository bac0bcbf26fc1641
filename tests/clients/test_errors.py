"""Every status of the contract arrives as its exception, with nothing lost, in both clients."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

import pellucid_client as p
from pellucid.v1 import inference_pb2

from .conftest import Scripted, answer, fail

Code = grpc.StatusCode


def info(reason: str, **metadata: str) -> ErrorInfo:
    return ErrorInfo(reason=reason, domain="pellucid", metadata=metadata)


def retry(seconds: float) -> RetryInfo:
    detail = RetryInfo()
    detail.retry_delay.FromMilliseconds(round(seconds * 1000))
    return detail


CASES: list[tuple[Code, Sequence[Message], type[p.PellucidError]]] = [
    (Code.INVALID_ARGUMENT, [info("INVALID_FIELD")], p.InvalidRequest),
    (Code.INVALID_ARGUMENT, [info("UNSUPPORTED_FIELD")], p.InvalidRequest),
    (Code.INVALID_ARGUMENT, [info("PROMPT_TOO_LONG")], p.PromptTooLong),
    (Code.NOT_FOUND, [info("MODEL_NOT_FOUND")], p.ModelNotFound),
    (Code.ALREADY_EXISTS, [info("REQUEST_ID_IN_USE")], p.RequestIdInUse),
    (Code.RESOURCE_EXHAUSTED, [info("QUEUE_FULL"), retry(1.5)], p.Overloaded),
    (Code.RESOURCE_EXHAUSTED, [info("TENANT_QUOTA"), retry(0.25)], p.Overloaded),
    (Code.RESOURCE_EXHAUSTED, [info("REQUEST_TOO_LARGE")], p.RequestTooLarge),
    (Code.RESOURCE_EXHAUSTED, [info("SLOW_CONSUMER")], p.SlowConsumer),
    (Code.RESOURCE_EXHAUSTED, [info("SOMETHING_NEW")], p.ResourceExhausted),
    (Code.UNAVAILABLE, [info("DRAINING"), retry(5)], p.Unavailable),
    (Code.UNAVAILABLE, [info("MODEL_LOADING"), retry(1)], p.Unavailable),
    (Code.UNAVAILABLE, [info("ENGINE_DOWN"), retry(1)], p.Unavailable),
    (Code.UNAVAILABLE, [], p.ConnectionFailed),
    (Code.DEADLINE_EXCEEDED, [], p.DeadlineExceeded),
    (Code.CANCELLED, [], p.Cancelled),
    (Code.INTERNAL, [info("ENGINE_ERROR", request_id="r1")], p.InternalError),
    (Code.INTERNAL, [info("NON_FINITE_LOGITS", request_id="r1")], p.InternalError),
    (Code.UNKNOWN, [], p.InternalError),
    (Code.UNAUTHENTICATED, [info("KEY_MISSING")], p.Unauthenticated),
    (Code.PERMISSION_DENIED, [], p.PermissionDenied),
    (Code.UNIMPLEMENTED, [], p.PellucidError),
]


def check(error: p.PellucidError, code: Code, details: Sequence[Message], kind: type[p.PellucidError]) -> None:
    given = {type(detail): detail for detail in details}
    assert type(error) is kind
    assert error.code is code
    assert "the message" in str(error)
    assert error.reason == (given[ErrorInfo].reason if ErrorInfo in given else None)  # type: ignore[attr-defined]
    assert error.metadata == (dict(given[ErrorInfo].metadata) if ErrorInfo in given else {})  # type: ignore[attr-defined]
    expected_delay = given[RetryInfo].retry_delay.ToMilliseconds() / 1000 if RetryInfo in given else None  # type: ignore[attr-defined]
    assert error.retry_after == expected_delay
    assert len(error.details) == len(details)


@pytest.mark.parametrize(("code", "details", "kind"), CASES)
def test_each_status_becomes_its_exception(
    scripted: Scripted, code: Code, details: Sequence[Message], kind: type[p.PellucidError]
) -> None:
    scripted.unary = lambda context: fail(context, code, "the message", details)
    scripted.generate = lambda request, context: fail(context, code, "the message", details)
    with p.Client(scripted.address, attempts=1) as client:
        with pytest.raises(p.PellucidError) as unary:
            client.tokenize("x")
        with pytest.raises(p.PellucidError) as stream:
            client.generate("x").result()
    check(unary.value, code, details, kind)
    check(stream.value, code, details, kind)


@pytest.mark.parametrize(("code", "details", "kind"), CASES)
async def test_each_status_becomes_its_exception_in_asyncio(
    scripted: Scripted, code: Code, details: Sequence[Message], kind: type[p.PellucidError]
) -> None:
    scripted.unary = lambda context: fail(context, code, "the message", details)
    scripted.generate = lambda request, context: fail(context, code, "the message", details)
    async with p.AsyncClient(scripted.address, attempts=1) as client:
        with pytest.raises(p.PellucidError) as unary:
            await client.tokenize("x")
        with pytest.raises(p.PellucidError) as stream:
            await client.generate("x").result()
    check(unary.value, code, details, kind)
    check(stream.value, code, details, kind)


def test_a_deadline_that_has_not_passed_here_is_told_in_the_others_words(scripted: Scripted) -> None:
    """A proxy's, for one, which has a limit of its own."""
    scripted.unary = lambda context: fail(context, Code.DEADLINE_EXCEEDED, "the message")
    with p.Client(scripted.address) as client, pytest.raises(p.DeadlineExceeded, match=r"^the message$"):
        client.tokenize("x", timeout=60)


def test_every_violation_is_kept(scripted: Scripted) -> None:
    bad = BadRequest()
    bad.field_violations.add(field="sampling.temperature", description="200 is not in [0, 100]")
    bad.field_violations.add(field="sampling.top_p", description="0 is not in (0, 1]")
    scripted.generate = lambda request, context: fail(
        context, Code.INVALID_ARGUMENT, "two fields", [info("INVALID_FIELD"), bad]
    )
    with p.Client(scripted.address) as client, pytest.raises(p.InvalidRequest) as caught:
        client.generate("x", temperature=200, top_p=0).result()
    assert caught.value.violations == (
        p.Violation("sampling.temperature", "200 is not in [0, 100]"),
        p.Violation("sampling.top_p", "0 is not in (0, 1]"),
    )
    assert str(caught.value.violations[0]) == "sampling.temperature: 200 is not in [0, 100]"


def test_a_stream_that_fails_halfway_keeps_what_came_before(scripted: Scripted) -> None:
    def generate(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        yield next(answer("今天", "天气")(request, context))
        fail(context, Code.INTERNAL, "broken", [info("ENGINE_ERROR")])

    scripted.generate = generate
    with p.Client(scripted.address) as client:
        stream = client.generate("x")
        assert next(stream).text == "今天"
        with pytest.raises(p.InternalError):
            next(stream)
        assert stream.text == "今天"
        assert stream.finish is None


def test_details_that_contradict_the_status_are_left_out(scripted: Scripted) -> None:
    def contradict(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\x08\x03"),))
        context.abort(Code.NOT_FOUND, "gone")

    scripted.unary = contradict
    with p.Client(scripted.address) as client, pytest.raises(p.ModelNotFound) as caught:
        client.model("x")
    assert caught.value.details == ()


def test_a_message_over_the_limit_is_too_large(scripted: Scripted) -> None:
    with p.Client(scripted.address) as client:
        with pytest.raises(p.RequestTooLarge):
            client.tokenize("x" * (17 * 2**20))
        assert client.tokenize("x").token_ids == (120,)


def test_an_answer_over_grpcs_own_limit_arrives(scripted: Scripted) -> None:
    with p.Client(scripted.address) as client:
        assert client.detokenize([120] * 3_000_000) == "x" * 3_000_000
        assert len(client.detokenize([0x4E2D] * 1_000_000)) == 1_000_000
        scripted.generate = answer("x" * (5 * 2**20))
        assert len(client.generate("x").result().text) == 5 * 2**20


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


CALLS: list[Callable[[Any], Any]] = [
    lambda client: client.tokenize("x"),
    lambda client: client.is_ready(),
    lambda client: client.generate("x").result(),
]


@pytest.mark.parametrize("call", CALLS)
def test_no_server_at_the_address(call: Callable[[p.Client], object]) -> None:
    address = free_address()
    with p.Client(address) as client, pytest.raises(p.ConnectionFailed) as caught:
        call(client)
    assert str(caught.value).startswith(f"no connection to the server at {address}: Connection refused")


@pytest.mark.parametrize("call", CALLS)
async def test_no_server_at_the_address_in_asyncio(call: Callable[[p.AsyncClient], Any]) -> None:
    address = free_address()
    async with p.AsyncClient(address) as client:
        with pytest.raises(p.ConnectionFailed, match=address):
            await call(client)


def test_the_tree_has_one_root() -> None:
    kinds = [value for value in vars(p).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(kinds) >= 15
    assert all(issubclass(kind, p.PellucidError) for kind in kinds)
