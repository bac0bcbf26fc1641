"""Which calls are tried again: UNAVAILABLE ones of which nothing has come yet, and for how long."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from pellucid.v1 import inference_pb2
from pellucid_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    RequestTooLarge,
    Unavailable,
)
from pellucid_client._retry import DEFAULT_ATTEMPTS, Retries
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_testing.scripted_engine import Script
from pellucid_testing.server import serve, start_server

from .conftest import Generate, Scripted, answer, fail
from .test_errors import free_address, info, retry

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"


def failing(times: int, code: grpc.StatusCode, *details: ErrorInfo | RetryInfo, after: str = "") -> Generate:
    """Fails the first calls, after one message where there is text for it; then answers."""
    left = times

    def generate(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        nonlocal left
        left -= 1
        if left < 0:
            yield from answer("今天", "天气")(request, context)
        else:
            if after:
                yield next(answer(after, "")(request, context))
            fail(context, code, "no", details)

    return generate


LOADING = (info("MODEL_LOADING"), retry(0.01))


def sync_result(address: str, **options: Any) -> str:
    with Client(address) as client:
        return client.generate("x", **options).result().text


def async_result(address: str, **options: Any) -> str:
    async def run() -> str:
        async with AsyncClient(address) as client:
            return (await client.generate("x", **options).result()).text

    return asyncio.run(run())


BOTH = pytest.mark.parametrize("result", [sync_result, async_result])
Result = Callable[..., str]


@BOTH
def test_a_stream_is_tried_until_it_begins(scripted: Scripted, result: Result) -> None:
    scripted.generate = failing(DEFAULT_ATTEMPTS - 1, grpc.StatusCode.UNAVAILABLE, *LOADING)
    assert result(scripted.address, request_id="mine") == "今天天气"
    assert [request.request_id for request in scripted.requests] == ["mine"] * DEFAULT_ATTEMPTS


@BOTH
def test_attempts_end(scripted: Scripted, result: Result) -> None:
    scripted.generate = failing(DEFAULT_ATTEMPTS, grpc.StatusCode.UNAVAILABLE, *LOADING)
    with pytest.raises(Unavailable) as caught:
        result(scripted.address)
    assert (caught.value.reason, caught.value.retry_after) == ("MODEL_LOADING", 0.01)
    assert len(scripted.requests) == DEFAULT_ATTEMPTS


@BOTH
def test_a_stream_that_has_begun_is_not_tried_again(scripted: Scripted, result: Result) -> None:
    scripted.generate = failing(1, grpc.StatusCode.UNAVAILABLE, info("DRAINING"), retry(0.01), after="今天")
    with pytest.raises(Unavailable):
        result(scripted.address)
    assert len(scripted.requests) == 1


@BOTH
def test_an_answer_whose_last_message_has_come_is_whole_whatever_happens_to_the_connection(
    scripted: Scripted, result: Result
) -> None:
    def generate(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        yield from answer("今天", "天气")(request, context)
        fail(context, grpc.StatusCode.UNAVAILABLE, "the connection broke")

    scripted.generate = generate
    assert result(scripted.address) == "今天天气"
    assert len(scripted.requests) == 1


@BOTH
def test_only_unavailable_is_tried_again(scripted: Scripted, result: Result) -> None:
    scripted.generate = failing(1, grpc.StatusCode.RESOURCE_EXHAUSTED, info("QUEUE_FULL"), retry(0.01))
    with pytest.raises(Overloaded):
        result(scripted.address)
    scripted.generate = failing(1, grpc.StatusCode.INTERNAL, info("ENGINE_ERROR"))
    with pytest.raises(InternalError):
        result(scripted.address)
    assert len(scripted.requests) == 2


@BOTH
def test_a_wait_longer_than_the_timeout_is_not_begun(scripted: Scripted, result: Result) -> None:
    scripted.generate = failing(1, grpc.StatusCode.UNAVAILABLE, info("MODEL_LOADING"), retry(30))
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        result(scripted.address, timeout=10)
    assert caught.value.reason == "MODEL_LOADING"
    assert time.monotonic() - began < 5


@BOTH
def test_the_timeout_covers_all_attempts(scripted: Scripted, result: Result) -> None:
    def generate(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(0.3)
        fail(context, grpc.StatusCode.UNAVAILABLE, "no", LOADING)
        yield

    scripted.generate = generate
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        result(scripted.address, timeout=0.5)
    assert time.monotonic() - began < 5
    assert len(scripted.requests) <= 2  # else each has a time of its own


async def test_unary_calls_are_tried_again(scripted: Scripted) -> None:
    left = 0

    def unavailable(context: grpc.ServicerContext) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            fail(context, grpc.StatusCode.UNAVAILABLE, "no", LOADING)

    scripted.unary = unavailable
    left = DEFAULT_ATTEMPTS - 1
    with Client(scripted.address) as client:
        assert client.load().running_request_count == 2
        left = 1
        with Client(scripted.address, attempts=1) as once, pytest.raises(Unavailable):
            once.load()
    left = DEFAULT_ATTEMPTS - 1
    async with AsyncClient(scripted.address) as other:
        assert (await other.load()).running_request_count == 2
        left = DEFAULT_ATTEMPTS
        with pytest.raises(Unavailable):
            await other.load()


async def test_cancel_between_attempts(scripted: Scripted) -> None:
    """Of two attempts, which would be a minute apart."""
    scripted.generate = failing(9, grpc.StatusCode.UNAVAILABLE, info("MODEL_LOADING"), retry(60))

    def cancel_later(count: int, cancel: Callable[[], object]) -> None:
        end = time.monotonic() + 30
        while len(scripted.requests) < count and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        cancel()

    with Client(scripted.address) as client:
        stream = client.generate("x")
        threading.Thread(target=cancel_later, args=(1, stream.cancel)).start()
        with pytest.raises(Cancelled):
            next(stream)
    async with AsyncClient(scripted.address) as other:
        reading = other.generate("x")
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=cancel_later,
            args=(
                2,
                lambda: loop.call_soon_threadsafe(reading.cancel),
            ),
        ).start()
        with pytest.raises(Cancelled):
            await anext(reading)
    assert len(scripted.requests) == 2


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_client_may_wait_for_room(scripted: Scripted, kind: type[Client] | type[AsyncClient]) -> None:
    scripted.generate = failing(2, grpc.StatusCode.RESOURCE_EXHAUSTED, info("QUEUE_FULL"), retry(0.001))
    client = kind(scripted.address, attempts=1, wait_for_room=True)
    answered: Any = client.generate("x", timeout=30).result()
    completion = await answered if kind is AsyncClient else answered
    assert completion.text == "今天天气"
    assert len(scripted.requests) == 3

    scripted.generate = failing(3, grpc.StatusCode.RESOURCE_EXHAUSTED, info("REQUEST_TOO_LARGE"))
    with pytest.raises(RequestTooLarge):  # There will never be room for it.
        await client.generate("x").result() if isinstance(client, AsyncClient) else client.generate("x").result()
    closed: Any = client.close()
    if kind is AsyncClient:
        await closed


class Refused(grpc.RpcError):
    """What the client reads of a failed call besides its status."""

    def __init__(self, *trailers: tuple[str, str]) -> None:
        self._trailers = trailers

    def trailing_metadata(self) -> Any:
        return self._trailers


UNAVAILABLE = Unavailable("no", code=grpc.StatusCode.UNAVAILABLE)


def test_the_servers_pushback_decides() -> None:
    assert Retries(2, None).delay(Refused(("grpc-retry-pushback-ms", "1500")), UNAVAILABLE) == 1.5
    assert Retries(2, None).delay(Refused(("grpc-retry-pushback-ms", "0")), UNAVAILABLE) == 0
    for no in ("-1", "never", ""):
        assert Retries(2, None).delay(Refused(("grpc-retry-pushback-ms", no)), UNAVAILABLE) is None


def test_the_backoff_grows() -> None:
    retries = Retries(8, None)
    delays = [retries.delay(Refused(), UNAVAILABLE) for _ in range(8)]
    assert delays.pop() is None
    for delay, expected in zip(delays, [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0], strict=True):
        assert delay == pytest.approx(expected, rel=0.21)


OVERLOADED = Overloaded("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=0.5)


def test_waits_for_room_are_at_least_as_long_as_asked_and_grow() -> None:
    assert Retries(3, None).delay(Refused(), OVERLOADED) is None
    retries = Retries(1, None, wait_for_room=True)
    delays = [retries.delay(Refused(), OVERLOADED) for _ in range(2000)]
    for delay, least in zip(delays, [0.5, 0.5, 0.5, 0.8, 1.6, *[2.0] * 1995], strict=True):
        assert delay is not None
        assert least <= delay <= least * 1.4
    assert len(set(delays)) > 1000
    assert Retries(1, None, wait_for_room=True).delay(Refused(("grpc-retry-pushback-ms", "-1")), OVERLOADED) is None
    assert Retries(1, 0.4, wait_for_room=True).delay(Refused(), OVERLOADED) is None
    assert Retries(1, None, wait_for_room=True).delay(Refused(), UNAVAILABLE) is None


def test_a_wait_without_end_is_not_begun() -> None:
    for trailers in ([("grpc-retry-pushback-ms", "9" * 400)], [("grpc-retry-pushback-ms", "9" * 15)]):
        assert Retries(3, None).delay(Refused(*trailers), UNAVAILABLE) is None


def test_a_count_of_attempts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="attempts: 0"):
        Client(free_address(), attempts=0)
    with pytest.raises(ValueError, match="attempts: -1"):
        AsyncClient(free_address(), attempts=-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for the scripted engine: it has a tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps({}))
    CharacterTokenizer.train([LETTERS]).save(folder)
    return folder


def test_a_server_that_is_still_loading(folder: Path, tmp_path: Path) -> None:
    """Its engine stops before it is ready."""
    script = Script(lives=str(tmp_path / "lives"), hang_after_steps=[0])
    server = start_server(folder, program=script.program())
    try:
        server.load_until_refused(2)
        with Client(server.address, attempts=1) as once, pytest.raises(Unavailable) as caught:
            once.generate("a", max_new_tokens=3).result()
        assert caught.value.reason == "MODEL_LOADING"
        assert caught.value.retry_after is not None
        with Client(server.address) as client:
            assert client.generate("a", max_new_tokens=3).result().usage.output_token_count == 3
        assert server.metric("pellucid_requests_finished_total", reason="max_new_tokens") == 1
    finally:
        server.close()


@BOTH
def test_a_killed_server_ends_a_stream_that_has_not_begun(folder: Path, tmp_path: Path, result: Result) -> None:
    """The connection breaks under a waiting stream, and no attempt after that can connect."""
    script = Script(lives=str(tmp_path / "lives"), step_seconds=0.01, token_pause_after=1)
    with serve(folder, program=script.program()) as server:
        address = server.address

        def kill() -> None:
            server.wait_for_metric("pellucid_requests_running", 1)
            server.process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(ConnectionFailed):
            result(address, delivery="final", timeout=30)
        killer.join()
        assert time.monotonic() - began < 20
