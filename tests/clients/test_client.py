"""What both clients do with a server that answers as the contract says."""

# ruff: noqa: ASYNC109
# `timeout` is a case here.

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

import pellucid_client
from pellucid.v1 import inference_pb2
from pellucid_client import (
    AsyncClient,
    Cancelled,
    Chunk,
    Client,
    ClientClosed,
    Completion,
    DeadlineExceeded,
    Finish,
    InternalError,
    InvalidRequest,
    TokenAlternative,
    TokenLogprob,
    Usage,
)

from .conftest import Scripted, answer, serve, several
from .test_errors import free_address

PUBLIC_NAMES = """
    AsyncClient AsyncGenerateStream Cancelled Chunk Client ClientClosed Completion ConnectionFailed
    DeadlineExceeded DetokenizeOptions Finish GenerateOptions GenerateStream InternalError InvalidRequest Load Model
    ModelNotFound Output Overloaded PellucidError PermissionDenied PromptInfo PromptTooLong RequestIdInUse
    RequestTooLarge ResourceExhausted Sampling ServerInfo SlowConsumer Stopping Timings TokenAlternative TokenLogprob
    Tokenization
    TokenizeOptions Unauthenticated Unavailable Usage Violation
"""


def test_exported_names() -> None:
    assert pellucid_client.__all__ == PUBLIC_NAMES.split()
    assert all(hasattr(pellucid_client, name) for name in pellucid_client.__all__)
    assert set(pellucid_client.__all__) <= set(dir(pellucid_client))
    assert not hasattr(pellucid_client, "Clint")


def check_completion(completion: Completion) -> None:
    assert completion.text == "今天天气"
    assert completion.token_ids == (1, 2)
    assert completion.finish == Finish("eos", 2, 2)
    assert completion.usage == Usage(3, 2, 0)
    assert completion.timings.total_time == 1.5
    assert completion.timings.time_to_first_token is None
    assert completion.prompt.request_id == "mine"
    assert completion.prompt.sampling.seed == 7
    assert completion.prompt.sampling.temperature is None
    assert completion.prompt.stopping.max_new_tokens == 256
    assert completion.prompt.context == "reject"


def test_a_stream_chunk_by_chunk(scripted: Scripted) -> None:
    with Client(scripted.address) as client, client.generate("x", request_id="mine") as stream:
        assert (stream.prompt, stream.text, stream.finish) == (None, "", None)
        assert next(stream) == Chunk("今天", (1,), None)
        assert stream.prompt is not None
        assert stream.prompt.model == "scripted"
        assert (stream.text, stream.usage) == ("今天", None)
        assert next(stream) == Chunk("天气", (2,), Finish("eos", 2, 2))
        with pytest.raises(StopIteration):
            next(stream)
        check_completion(stream.result())


async def test_a_stream_chunk_by_chunk_in_asyncio(scripted: Scripted) -> None:
    async with AsyncClient(scripted.address) as client, client.generate("x", request_id="mine") as stream:
        chunks = [chunk async for chunk in stream]
        assert [chunk.text for chunk in chunks] == ["今天", "天气"]
        check_completion(await stream.result())


async def test_several_sequences_come_chunk_by_chunk_with_their_index(scripted: Scripted) -> None:
    scripted.generate = several
    with Client(scripted.address) as client:
        stream = client.generate("x", n=2, logprobs=1)
        chunks = list(stream)
        answer = stream.result()
    assert [(chunk.index, chunk.text, chunk.token_ids) for chunk in chunks] == [
        (1, "b", (5,)),
        (0, "a", (3, 4)),
        (1, "c", (6,)),
        (1, "d", ()),
    ]
    assert [chunk.finish is not None for chunk in chunks] == [False, True, False, True]
    assert [output.text for output in answer.outputs] == ["a", "bcd"] == [output.text for output in stream.outputs]
    assert (answer.text, answer.token_ids, answer.finish) == ("a", (3, 4), answer.outputs[0].finish)
    entries = answer.outputs[1].logprobs
    assert [(entry.token_id, entry.logprob, entry.rank, entry.token) for entry in entries] == [
        (5, -1.5, 2, b"\xe5\xa4"),
        (6, -1.5, 2, b"\xe5\xa4"),
    ]
    assert entries[0].alternatives == (TokenAlternative(9, -0.25, 1, b"a"),)
    assert answer.prompt.logprobs == (TokenLogprob(1, None, 0, b"x", ()),)
    assert (answer.usage, answer.prompt.cached_token_count) == (Usage(3, 4, 2), 2)
    async with AsyncClient(scripted.address) as other:
        assert await other.generate("x", n=2, logprobs=1).result() == answer


async def test_unary_calls_are_the_same_in_both_clients(scripted: Scripted) -> None:
    with Client(scripted.address) as client:
        calls: list[Any] = [
            client.tokenize("ab", model="m", omit_special_tokens=True),
            client.tokenize_batch(["ab", ""]),
            client.detokenize([97]),
            client.detokenize_batch([[97], []]),
            client.models(),
            client.model("other"),
            client.server_info(),
            client.load(),
            client.cancel("running"),
            client.cancel("gone"),
            client.is_ready(),
        ]
    sync_requests, scripted.requests = scripted.requests, []
    async with AsyncClient(scripted.address) as client:
        async_calls: list[Any] = [
            await client.tokenize("ab", model="m", omit_special_tokens=True),
            await client.tokenize_batch(["ab", ""]),
            await client.detokenize([97]),
            await client.detokenize_batch([[97], []]),
            await client.models(),
            await client.model("other"),
            await client.server_info(),
            await client.load(),
            await client.cancel("running"),
            await client.cancel("gone"),
            await client.is_ready(),
        ]
    assert calls == async_calls
    assert scripted.requests == sync_requests
    assert [each.token_ids for each in calls[1]] == [(97, 98), ()]
    assert calls[2:4] == ["a", ["a", ""]]
    assert calls[4][0].default_sampling.temperature == 0.0
    assert calls[4][0].default_sampling.top_k is None
    assert calls[5].name == "other"
    assert calls[6].version == "9.8.7"
    assert calls[7].running_request_count == 2
    assert calls[8:] == [True, False, True]


class Endless:
    """A stream that goes on until the client goes away, and tells when that was."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __call__(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        context.add_callback(self.ended.set)
        yield next(answer("a", "b")(request, context))
        self.ended.wait()


def test_cancel_ends_the_stream_and_the_work(scripted: Scripted) -> None:
    scripted.generate = endless = Endless()
    with Client(scripted.address) as client:
        stream = client.generate("x")
        assert next(stream).text == "a"
        stream.cancel()
        with pytest.raises(Cancelled):
            next(stream)
        assert endless.ended.wait(30)
        assert stream.text == "a"


def test_leaving_the_block_cancels(scripted: Scripted) -> None:
    scripted.generate = endless = Endless()
    with Client(scripted.address) as client:
        with client.generate("x") as stream:
            next(stream)
        assert endless.ended.wait(30)


async def test_cancel_in_asyncio(scripted: Scripted) -> None:
    scripted.generate = endless = Endless()
    async with AsyncClient(scripted.address) as client:
        stream = client.generate("x")
        assert (await anext(stream)).text == "a"
        stream.cancel()
        with pytest.raises(Cancelled):
            await anext(stream)
        assert await asyncio.to_thread(endless.ended.wait, 30)


async def test_leaving_the_block_cancels_in_asyncio(scripted: Scripted) -> None:
    scripted.generate = endless = Endless()
    async with AsyncClient(scripted.address) as client:
        async with client.generate("x") as stream:
            await anext(stream)
        assert await asyncio.to_thread(endless.ended.wait, 30)


async def test_a_cancelled_task_stays_a_cancelled_task_and_ends_the_work(scripted: Scripted) -> None:
    scripted.generate = endless = Endless()
    async with AsyncClient(scripted.address) as client:
        stream = client.generate("x")
        await anext(stream)
        task = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(endless.ended.wait, 30)


async def test_timeouts(scripted: Scripted) -> None:
    scripted.generate = Endless()
    scripted.unary = lambda context: time.sleep(0.5)
    with Client(scripted.address) as client:
        with pytest.raises(DeadlineExceeded, match=r"^timeout: 0\.2 s passed before the call was done$"):
            client.generate("x", timeout=0.2).result()
        with pytest.raises(DeadlineExceeded, match=r"^timeout: 0\.05 s passed"):
            client.load(timeout=0.05)
    scripted.generate = Endless()
    async with AsyncClient(scripted.address) as client:
        with pytest.raises(DeadlineExceeded, match=r"^timeout: 0\.2 s passed"):
            await client.generate("x", timeout=0.2).result()
        with pytest.raises(DeadlineExceeded, match=r"^timeout: 0\.05 s passed"):
            await client.load(timeout=0.05)


def test_a_stream_without_its_end_is_an_error(scripted: Scripted) -> None:
    whole = answer("a", "b")
    scripted.generate = lambda request, context: iter([next(whole(request, context))])
    with Client(scripted.address) as client, pytest.raises(InternalError, match="ended without"):
        client.generate("x").result()


def test_values_from_a_newer_server_are_numbers(scripted: Scripted) -> None:
    scripted.generate = answer("a", reason=99)  # type: ignore[arg-type]
    with Client(scripted.address) as client:
        assert client.generate("x").result().finish.reason == "99"


def test_metadata_goes_with_every_call(scripted: Scripted) -> None:
    seen: list[bool] = []
    scripted.unary = lambda context: seen.append(("traceparent", "00-1") in list(context.invocation_metadata()))
    with Client(scripted.address, metadata=[("traceparent", "00-1")]) as client:
        client.load()
        client.tokenize("x")
    assert seen == [True, True]


def test_wait_until_ready_for_a_server_that_starts_late() -> None:
    script = Scripted()
    address = free_address()
    servers: list[grpc.Server] = []
    starter = threading.Timer(0.4, lambda: servers.append(serve(script, address)))
    starter.start()
    with Client(address) as client:
        client.wait_until_ready(10)
        assert client.is_ready()
    starter.join()
    servers[0].stop(grace=None).wait()


async def test_wait_until_ready_follows_the_health_service(scripted: Scripted) -> None:
    scripted.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    with Client(scripted.address) as client:
        assert not client.is_ready()
        with pytest.raises(DeadlineExceeded, match=f"the server at {scripted.address} was not ready in time"):
            client.wait_until_ready(0.2)
        threading.Timer(0.2, scripted.health.set, ("", health_pb2.HealthCheckResponse.SERVING)).start()
        client.wait_until_ready(10)
    scripted.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    async with AsyncClient(scripted.address) as client:
        assert not await client.is_ready()
        with pytest.raises(DeadlineExceeded, match="was not ready in time"):
            await client.wait_until_ready(0.2)
        threading.Timer(0.2, scripted.health.set, ("", health_pb2.HealthCheckResponse.SERVING)).start()
        await client.wait_until_ready(10)


def test_one_client_from_many_threads(scripted: Scripted) -> None:
    texts: list[str] = []
    with Client(scripted.address) as client:
        threads = [threading.Thread(target=lambda: texts.append(client.generate("x").result().text)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == ["今天天气"] * 16


def test_a_proxy_from_the_environment_is_not_asked_for_loopback(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{free_address()}")
    monkeypatch.delenv("no_proxy", raising=False)
    with Client(scripted.address) as client:
        assert client.is_ready(timeout=5)
    port = scripted.address.rpartition(":")[2]
    with Client(f"localhost:{port}") as client:
        assert client.is_ready(timeout=5)


CALLS: list[Callable[[Any], Any]] = [
    lambda client: client.generate("x").result(),
    lambda client: client.load(),
    lambda client: client.is_ready(),
    lambda client: client.wait_until_ready(5),
]


@pytest.mark.parametrize("call", CALLS)
async def test_a_closed_client_says_so(scripted: Scripted, call: Callable[[Any], Any]) -> None:
    client = Client(scripted.address)
    client.close()
    client.close()
    with pytest.raises(ClientClosed, match=f"this client of {scripted.address} is closed"):
        call(client)
    other = AsyncClient(scripted.address)
    await other.close()
    with pytest.raises(ClientClosed, match=f"this client of {scripted.address} is closed"):
        await call(other)


async def test_closing_ends_what_is_in_flight(scripted: Scripted) -> None:
    scripted.generate = Endless()
    client = Client(scripted.address)
    stream = client.generate("x")
    next(stream)
    client.close()
    with pytest.raises(Cancelled):
        stream.result()

    scripted.generate = Endless()
    other = AsyncClient(scripted.address)
    reading = other.generate("x")
    await anext(reading)
    task = asyncio.create_task(reading.result())
    await asyncio.sleep(0)
    await other.close()
    with pytest.raises(Cancelled):  # And not asyncio's CancelledError: nobody cancelled the task.
        await task

    came, go_on = threading.Event(), threading.Event()

    def wait(context: grpc.ServicerContext) -> None:
        came.set()
        go_on.wait(10)

    scripted.unary = wait
    third = AsyncClient(scripted.address)
    asking = asyncio.create_task(third.load())
    await asyncio.to_thread(came.wait, 10)
    await third.close()
    with pytest.raises(Cancelled, match="the client was closed"):
        await asking
    go_on.set()


@pytest.mark.parametrize("timeout", [1e8, 1e10, 1e300, float("inf"), 10**400])
async def test_a_very_long_timeout_is_none(scripted: Scripted, timeout: float) -> None:
    with Client(scripted.address) as client:
        assert client.generate("x", timeout=timeout).result().text == "今天天气"
        assert client.tokenize("a", timeout=timeout).token_ids == (97,)
        assert client.is_ready(timeout=timeout)
        client.wait_until_ready(timeout)
    async with AsyncClient(scripted.address) as other:
        assert (await other.generate("x", timeout=timeout).result()).text == "今天天气"
        assert (await other.tokenize("a", timeout=timeout)).token_ids == (97,)
        assert await other.is_ready(timeout=timeout)
        await other.wait_until_ready(timeout)


@pytest.mark.parametrize("timeout", [0, -1.5, float("nan"), float("-inf"), "5"])
async def test_a_timeout_that_cannot_be_is_refused(scripted: Scripted, timeout: Any) -> None:
    text = rf"timeout: {timeout!r} is not accepted; accepted: a number of seconds greater than 0"
    calls: list[Callable[[Any], Any]] = [
        lambda client: client.generate("x", timeout=timeout),
        lambda client: client.tokenize("a", timeout=timeout),
        lambda client: client.is_ready(timeout=timeout),
        lambda client: client.wait_until_ready(timeout),
    ]
    with Client(scripted.address) as client:
        for call in calls:
            with pytest.raises(InvalidRequest, match=text) as caught:
                call(client)
            assert [each.field for each in caught.value.violations] == ["timeout"]
    async with AsyncClient(scripted.address) as other:
        for call in calls:
            with pytest.raises(InvalidRequest, match=text):
                await call(other)
    assert scripted.requests == []
