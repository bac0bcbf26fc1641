"""What all calls share, over a real channel: headers, errors that are ours, and errors that are nobody's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from pellucid.v1 import server_pb2
from pellucid_server.delivery import MAX_MESSAGE_BYTES
from pellucid_server.errors import QueueFull
from pellucid_server.logs import LOGGER, JsonFormatter
from pellucid_server.metrics import Metrics
from pellucid_server.rpc.calls import Call, Calls
from pellucid_testing.calls import failure


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(self.format(record)))


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    before = LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.propagate = False
    yield handler
    LOGGER.removeHandler(handler)
    LOGGER.propagate = before


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m", lambda: 0)


@pytest.fixture
async def channel(metrics: Metrics) -> AsyncIterator[grpc.aio.Channel]:
    calls = Calls("instance", metrics)

    async def broken(message: server_pb2.GetLoadRequest, call: Call) -> server_pb2.GetLoadResponse:
        raise ZeroDivisionError("secret detail in /some/path")

    async def full(message: server_pb2.GetLoadRequest, call: Call) -> server_pb2.GetLoadResponse:
        raise QueueFull("no room")

    async def breaks_midway(raw: bytes, call: Call) -> None:
        call.assign_request_id("midway")
        await call.send(server_pb2.GetLoadResponse(running_request_count=1))
        raise ZeroDivisionError("secret detail in /some/path")

    async def endless(raw: bytes, call: Call) -> None:
        call.assign_request_id()
        await call.send(server_pb2.GetLoadResponse())
        await asyncio.Event().wait()

    async def large(message: server_pb2.GetLoadRequest, call: Call) -> server_pb2.GetServerInfoResponse:
        return server_pb2.GetServerInfoResponse(version="x" * MAX_MESSAGE_BYTES)

    async def grows_large(raw: bytes, call: Call) -> None:
        await call.send(server_pb2.GetServerInfoResponse(version="x"))
        await call.send(server_pb2.GetServerInfoResponse(version="x" * MAX_MESSAGE_BYTES))

    methods = {
        "Large": calls.unary("Large", server_pb2.GetLoadRequest, large),
        "GrowsLarge": calls.stream("GrowsLarge", grows_large),
        "Broken": calls.unary("Broken", server_pb2.GetLoadRequest, broken),
        "Full": calls.unary("Full", server_pb2.GetLoadRequest, full),
        "Midway": calls.stream("Midway", breaks_midway),
        "Endless": calls.stream("Endless", endless),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def fails(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return failure(caught.value)


def counted(metrics: Metrics, method: str, code: str) -> float:
    labels = {"method": method, "grpc_code": code}
    return metrics.registry.get_sample_value("pellucid_requests_total", labels) or 0.0


async def test_an_unforeseen_error_says_nothing_of_the_inside(
    channel: grpc.aio.Channel, metrics: Metrics, log: Log
) -> None:
    method: Any = channel.unary_unary("/test.Test/Broken")
    found = await fails(method(b"", metadata=[("x-request-id", "r1")]))
    assert (found.code, found.reason) == ("INTERNAL", "ENGINE_ERROR")
    assert found.message == "an error in the server ended request 'r1'"
    assert "secret" not in str(found)
    (event,) = log.events
    assert (event["request_id"], event["method"], event["level"]) == ("r1", "Broken", "error")
    assert "ZeroDivisionError: secret detail" in event["exception"]
    assert counted(metrics, "Broken", "INTERNAL") == 1


async def test_an_error_in_the_middle_of_a_stream(channel: grpc.aio.Channel, metrics: Metrics, log: Log) -> None:
    method: Any = channel.unary_stream("/test.Test/Midway")
    call = method(b"")
    assert server_pb2.GetLoadResponse.FromString(await call.read()).running_request_count == 1
    found = await fails(call.read())
    assert (found.code, found.headers["x-request-id"]) == ("INTERNAL", "midway")
    assert "x-request-id" not in found.trailers
    assert counted(metrics, "Midway", "INTERNAL") == 1


async def test_our_own_errors_carry_their_details(channel: grpc.aio.Channel, metrics: Metrics, log: Log) -> None:
    method: Any = channel.unary_unary("/test.Test/Full")
    found = await fails(method(b""))
    assert (found.code, found.reason, found.retry_after, found.message) == (
        "RESOURCE_EXHAUSTED",
        "QUEUE_FULL",
        0.5,
        "no room",
    )
    assert found.headers == {}
    assert found.trailers["x-pellucid-instance"] == "instance"
    assert len(found.trailers["x-request-id"]) == 16
    assert counted(metrics, "Full", "RESOURCE_EXHAUSTED") == 1
    assert [event for event in log.events if event["level"] != "debug"] == []


async def test_an_answer_beyond_the_limit_is_an_error_of_ours(
    channel: grpc.aio.Channel, metrics: Metrics, log: Log
) -> None:
    """gRPC itself refuses to send it: its status has no reason, and the server counts another one."""
    unary: Any = channel.unary_unary("/test.Test/Large")
    stream: Any = channel.unary_stream("/test.Test/GrowsLarge")
    call = stream(b"")
    await call.read()
    for method, failed in (("Large", unary(b"")), ("GrowsLarge", call.read())):
        found = await fails(failed)
        assert (found.code, found.reason) == ("RESOURCE_EXHAUSTED", "REQUEST_TOO_LARGE")
        assert f"bytes in one message, which may have {MAX_MESSAGE_BYTES}" in found.message
        assert counted(metrics, method, "RESOURCE_EXHAUSTED") == 1
    assert [event for event in log.events if event["level"] != "debug"] == []


@pytest.mark.parametrize("code", ["CANCELLED", "DEADLINE_EXCEEDED"])
async def test_calls_that_clients_end_are_counted_and_leave_no_task(
    channel: grpc.aio.Channel, metrics: Metrics, code: str
) -> None:
    method: Any = channel.unary_stream("/test.Test/Endless")
    for _ in range(20 if code == "CANCELLED" else 2):
        before = counted(metrics, "Endless", code)
        if code == "CANCELLED":
            call = method(b"")
            await call.read()
            call.cancel()
        else:
            await runs_into_its_deadline(method)
        async with asyncio.timeout(30):
            while counted(metrics, "Endless", code) == before:  # noqa: ASYNC110 a counter has no event
                await asyncio.sleep(0.005)
    handlers = [task for task in asyncio.all_tasks() if "endless" in repr(task)]
    assert handlers == []


async def runs_into_its_deadline(method: Any) -> None:
    """After its first message, for which a busy machine may need another try with more time."""
    for seconds in (0.1, 3.0, 30.0):
        call, count = method(b"", timeout=seconds), 0
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                count += 1
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if count:
            return
    raise AssertionError("no message came before a deadline")


class Unsendable:
    """gRPC fails to send just before it says that a call is cancelled, which no client can bring about for certain."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self.tried = asyncio.Event()

    invocation_metadata = time_remaining = staticmethod(lambda: None)

    async def send_initial_metadata(self, headers: object) -> None:
        self.tried.set()
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: 8")

    async def abort(self, code: grpc.StatusCode, *details: object) -> None:
        self.code = code


@pytest.mark.parametrize("kind", ["stream", "unary"])
@pytest.mark.parametrize("gone", [True, False])
async def test_a_client_that_goes_as_it_is_answered_is_no_error(
    metrics: Metrics, log: Log, kind: str, gone: bool
) -> None:
    calls: Any = Calls("instance", metrics)
    context = Unsendable()

    async def empty(message: server_pb2.GetLoadRequest, call: Call) -> server_pb2.GetLoadResponse:
        return server_pb2.GetLoadResponse()

    if kind == "stream":
        handle = calls.stream("Answers", lambda raw, call: call.send(server_pb2.GetLoadResponse())).unary_stream
    else:
        handle = calls.unary("Answers", server_pb2.GetLoadRequest, empty).unary_unary
    running = asyncio.ensure_future(handle(b"", context))
    await context.tried.wait()
    if gone:
        running.cancel()
    with pytest.raises(asyncio.CancelledError if gone else grpc.aio.InternalError):
        await running
    assert counted(metrics, "Answers", "CANCELLED" if gone else "INTERNAL") == 1
    assert [event["level"] for event in log.events] == ([] if gone else ["error"])
    assert context.code == (grpc.StatusCode.OK if gone else grpc.StatusCode.INTERNAL)
