"""The asyncio client: the synchronous one with `await`.

    >>> from pellucid_client import AsyncClient
    >>> async with AsyncClient("127.0.0.1:50051") as client:
    ...     async for chunk in client.generate("今天天气", temperature=0.7, seed=1):
    ...         print(chunk.text, end="", flush=True)

Make the client inside the event loop that uses it. Cancelling a task that reads a stream cancels the request.
"""

# ruff: noqa: ASYNC109, ASYNC110
# A timeout here is a gRPC deadline, which the server learns of too; asyncio.timeout would only cancel on this side.
# Between two watches there is no event to await.

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message

from pellucid.v1 import inference_pb2, model_pb2, server_pb2
from pellucid_client import _calls, _retry, _security, _target
from pellucid_client._calls import Operation, Response, Result
from pellucid_client._options import DetokenizeOptions, GenerateOptions, TokenizeOptions
from pellucid_client._requests import (
    cancel_request,
    detokenize_request,
    generate_request,
    model_request,
    tokenize_request,
)
from pellucid_client._retry import Deadline, Retries
from pellucid_client._stream import StreamBase, cancelled_here
from pellucid_client.errors import Cancelled, ClientClosed, DeadlineExceeded, Unavailable, error_from_rpc
from pellucid_client.results import Chunk, Completion
from pellucid_client.served import Load, Model, ServerInfo, Tokenization


class AsyncGenerateStream(StreamBase):
    """An answer as it is made: iterate over its chunks with `async for`, or take the whole with `await result()`.

    As a context manager (`async with`) it cancels the request where the block is left before the end.
    """

    def __init__(self, start: Callable[[float | None], Any], retries: Retries, address: str) -> None:
        self._cancelled: asyncio.Event
        self._call: Any
        super().__init__(start, retries, address, asyncio.Event())
        self._messages: AsyncIterator[inference_pb2.GenerateResponse] = aiter(self._call)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            try:
                self._take(await anext(self._messages))
                continue
            except grpc.RpcError as error:
                if self._is_whole:
                    raise StopAsyncIteration from None
                failure = error_from_rpc(error, self._address, self._retries.passed())
                if (delay := self._delay(error, failure)) is None:
                    raise failure from error
            except asyncio.CancelledError:
                if not self._cancelled.is_set() and _task_is_cancelled():
                    raise  # The task is cancelled, not the stream or its client.
                raise cancelled_here() from None
            await self._pause(delay)
            self._restart()
            self._messages = aiter(self._call)
        return self._chunks.popleft()

    async def _pause(self, seconds: float) -> None:
        """Waits. Raises Cancelled where the stream is cancelled meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), seconds)
            raise cancelled_here()

    async def result(self) -> Completion:
        """Reads to the end and returns the whole answer, chunks already read included."""
        async for _ in self:
            pass
        return self._completion()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncClient:
    """A connection to a Pellucid server, or to several that serve the same; close it, or use it with
    `async with`. Arguments, results and errors of it and of its methods are those of `Client`.
    """

    def __init__(
        self,
        address: str | Sequence[str] = _calls.DEFAULT_ADDRESS,
        *,
        tls: bool = False,
        ca_certificate: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        attempts: int = _retry.DEFAULT_ATTEMPTS,
        wait_for_room: bool = False,
    ) -> None:
        self.address = _target.target(address)
        credentials = _security.channel_credentials(
            credentials, tls=tls, ca_certificate=ca_certificate, certificate=certificate, key=key
        )
        self._metadata = _security.call_metadata(tuple(metadata), token)
        self._attempts = _retry.check_attempts(attempts)
        self._wait_for_room = wait_for_room
        self._closed = False
        options = _target.channel_options(self.address)
        self._channel = (
            grpc.aio.insecure_channel(self.address, options)
            if credentials is None
            else grpc.aio.secure_channel(self.address, credentials, options)
        )
        self._generate: grpc.aio.UnaryStreamMultiCallable[Message, inference_pb2.GenerateResponse]
        self._generate = self._channel.unary_stream(
            _calls.GENERATE_PATH, _calls.serialize, inference_pb2.GenerateResponse.FromString
        )

    def generate(
        self, prompt: str | Sequence[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerateStream:
        """As `Client.generate`; only the stream is read with `async for`, or with `await stream.result()`."""
        request = generate_request(prompt, options)
        return AsyncGenerateStream(
            lambda timeout: self._start(self._generate, request, timeout),
            self._retries(options.get("timeout")),
            self.address,
        )

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> bool:
        return await self._unary(_calls.CANCEL, cancel_request(request_id), timeout)

    async def tokenize(self, text: str, **options: Unpack[TokenizeOptions]) -> Tokenization:
        return _calls.one(await self.tokenize_batch([text], **options))

    async def tokenize_batch(self, texts: Sequence[str], **options: Unpack[TokenizeOptions]) -> list[Tokenization]:
        return await self._unary(_calls.TOKENIZE, tokenize_request(texts, options), options.get("timeout"))

    async def detokenize(self, token_ids: Sequence[int], **options: Unpack[DetokenizeOptions]) -> str:
        return _calls.one(await self.detokenize_batch([token_ids], **options))

    async def detokenize_batch(
        self, sequences: Sequence[Sequence[int]], **options: Unpack[DetokenizeOptions]
    ) -> list[str]:
        return await self._unary(_calls.DETOKENIZE, detokenize_request(sequences, options), options.get("timeout"))

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        return await self._unary(_calls.LIST_MODELS, model_pb2.ListModelsRequest(), timeout)

    async def model(self, name: str | None = None, *, timeout: float | None = None) -> Model:
        return await self._unary(_calls.GET_MODEL, model_request(name), timeout)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        return await self._unary(_calls.GET_SERVER_INFO, server_pb2.GetServerInfoRequest(), timeout)

    async def load(self, *, timeout: float | None = None) -> Load:
        return await self._unary(_calls.GET_LOAD, server_pb2.GetLoadRequest(), timeout)

    async def is_ready(self, *, timeout: float | None = None) -> bool:
        deadline = Deadline(timeout)
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_calls.HEALTH_CHECK_PATH)
        try:
            return _calls.is_serving(await self._answer(check, _calls.WHOLE_SERVER, deadline.remaining()))
        except grpc.RpcError as error:
            failure = error_from_rpc(error, self.address, deadline.passed())
            if isinstance(failure, Unavailable) and _target.names_several(self.address):
                return False  # The channel itself leaves out those that are not ready.
            raise failure from error

    async def wait_until_ready(self, timeout: float) -> None:
        deadline = Deadline(timeout)
        while not await self._watch_until_ready(deadline.remaining()):
            await asyncio.sleep(_calls.RETRY_SECONDS)

    async def _watch_until_ready(self, timeout: float | None) -> bool:
        """False: the server hung up before it was ready."""
        watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_calls.HEALTH_WATCH_PATH)
        call = self._start(watch, _calls.WHOLE_SERVER, timeout, wait_for_ready=True)
        try:
            async for status in call:
                if _calls.is_serving(status):
                    return True
        except grpc.RpcError as error:
            failure = error_from_rpc(error, self.address)
            if isinstance(failure, DeadlineExceeded):
                raise _calls.not_ready(self.address) from error
            if not isinstance(failure, Unavailable):
                raise failure from error
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        finally:
            call.cancel()
        return False

    async def close(self) -> None:
        """Cancels what is in flight and closes the connection."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(self, operation: Operation[Response, Result], request: Message, timeout: float | None) -> Result:
        call = self._channel.unary_unary(operation.path, _calls.serialize, operation.response.FromString)
        retries = self._retries(timeout)
        while True:
            try:
                return operation.convert(await self._answer(call, request, retries.remaining()))
            except grpc.RpcError as error:
                failure = error_from_rpc(error, self.address, retries.passed())
                if (delay := retries.delay(error, failure)) is None:
                    raise failure from error
            await asyncio.sleep(delay)

    def _retries(self, timeout: float | None) -> Retries:
        return Retries(self._attempts, timeout, wait_for_room=self._wait_for_room)

    def _start(self, call: Callable[..., Any], request: object, timeout: float | None, **more: Any) -> Any:
        try:
            return call(request, timeout=timeout, metadata=self._metadata, **more)
        except grpc.aio.UsageError:
            if self._closed:
                raise ClientClosed(self.address) from None
            raise

    async def _answer(self, call: Callable[..., Any], request: object, timeout: float | None) -> Any:
        """Of a unary call. Raises Cancelled where close() ends it; gRPC would pretend that the task is cancelled."""
        try:
            return await self._start(call, request, timeout)
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise

    def _raise_if_closed(self) -> None:
        if self._closed and not _task_is_cancelled():
            raise Cancelled("the client was closed", code=grpc.StatusCode.CANCELLED) from None
