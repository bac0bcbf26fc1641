"""The synchronous client.

    >>> from pellucid_client import Client
    >>> with Client("127.0.0.1:50051") as client:
    ...     for chunk in client.generate("今天天气", temperature=0.7, seed=1):
    ...         print(chunk.text, end="", flush=True)

Errors are those of pellucid_client.errors. One client may be used from many threads at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
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
from pellucid_client.errors import ClientClosed, DeadlineExceeded, Unavailable, error_from_rpc
from pellucid_client.results import Chunk, Completion
from pellucid_client.served import Load, Model, ServerInfo, Tokenization


class GenerateStream(StreamBase):
    """An answer as it is made: iterate over its chunks, or take the whole with `result()`.

    As a context manager it cancels the request where the block is left before the end:

        >>> with client.generate("今天天气") as stream:
        ...     for chunk in stream:
        ...         if "。" in chunk.text:
        ...             break
    """

    def __init__(self, start: Callable[[float | None], Any], retries: Retries, address: str) -> None:
        self._cancelled: threading.Event
        self._call: Any
        super().__init__(start, retries, address, threading.Event())

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._chunks:
            try:
                self._take(next(self._call))
                continue
            except grpc.RpcError as error:
                if self._is_whole:
                    raise StopIteration from None
                failure = error_from_rpc(error, self._address, self._retries.passed())
                if (delay := self._delay(error, failure)) is None:
                    raise failure from error
            if self._cancelled.wait(delay):
                raise cancelled_here()
            self._restart()
        return self._chunks.popleft()

    def result(self) -> Completion:
        """Reads to the end and returns the whole answer, chunks already read included."""
        for _ in self:
            pass
        return self._completion()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """A connection to a Pellucid server, or to several that serve the same; close it, or use it as a
    context manager.

    address      HOST:PORT; or several servers, which take turns: ["10.0.0.1:50051", "10.0.0.2:50051"],
                 "ipv4:10.0.0.1:50051,10.0.0.2:50051", or "dns:///NAME:50051"
    tls          encrypt, and hold the server's certificate against the system's authorities
    ca_certificate    PEM file of authorities to hold it against instead; asks for TLS too
    certificate, key  PEM files of a client certificate, for servers that want one; ask for TLS too
    token        bearer token, for servers that want one; without TLS anybody on the way can read it
    credentials  gRPC's own, in place of all of TLS above
    metadata     sent with every call, such as (("traceparent", "…"),)
    attempts     how often a call is tried while the server is UNAVAILABLE and nothing of the answer has come; 1 = once
    wait_for_room     where the server is full, try again until the call's timeout instead of raising Overloaded

    Raises ValueError for addresses, attempts or files that cannot be.
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
            grpc.insecure_channel(self.address, options)
            if credentials is None
            else grpc.secure_channel(self.address, credentials, options)
        )

    def generate(self, prompt: str | Sequence[int] | None = None, **options: Unpack[GenerateOptions]) -> GenerateStream:
        """Continues `prompt`, a text or token ids, or answers `messages`, a conversation. Options left out take the
        server's defaults; see GenerateOptions.

        >>> answer = client.generate("今天天气", max_new_tokens=20, stop=["。"]).result()
        >>> answer.text, answer.finish.reason, answer.usage.output_token_count
        >>> answer = client.generate(messages=[{"role": "user", "content": "你好"}]).result()
        """
        request = generate_request(prompt, options)
        call = self._channel.unary_stream(
            _calls.GENERATE_PATH, _calls.serialize, inference_pb2.GenerateResponse.FromString
        )
        return GenerateStream(
            lambda timeout: self._start(call, request, timeout),
            self._retries(options.get("timeout")),
            self.address,
        )

    def cancel(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Ends a request from outside its stream, which then ends well with finish "cancelled".

        False: no such request is in flight.
        """
        return self._unary(_calls.CANCEL, cancel_request(request_id), timeout)

    def tokenize(self, text: str, **options: Unpack[TokenizeOptions]) -> Tokenization:
        """The text's token ids, as `generate` would use them.

        >>> client.tokenize("今天天气").token_ids
        """
        return _calls.one(self.tokenize_batch([text], **options))

    def tokenize_batch(self, texts: Sequence[str], **options: Unpack[TokenizeOptions]) -> list[Tokenization]:
        """Like `tokenize`, for up to 1024 texts in one call."""
        return self._unary(_calls.TOKENIZE, tokenize_request(texts, options), options.get("timeout"))

    def detokenize(self, token_ids: Sequence[int], **options: Unpack[DetokenizeOptions]) -> str:
        """The text that token ids stand for."""
        return _calls.one(self.detokenize_batch([token_ids], **options))

    def detokenize_batch(self, sequences: Sequence[Sequence[int]], **options: Unpack[DetokenizeOptions]) -> list[str]:
        """Like `detokenize`, for up to 1024 sequences in one call."""
        return self._unary(_calls.DETOKENIZE, detokenize_request(sequences, options), options.get("timeout"))

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """The models that are loaded."""
        return self._unary(_calls.LIST_MODELS, model_pb2.ListModelsRequest(), timeout)

    def model(self, name: str | None = None, *, timeout: float | None = None) -> Model:
        """One model; without a name the only one loaded."""
        return self._unary(_calls.GET_MODEL, model_request(name), timeout)

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Version, device, limits."""
        return self._unary(_calls.GET_SERVER_INFO, server_pb2.GetServerInfoRequest(), timeout)

    def load(self, *, timeout: float | None = None) -> Load:
        """What the server is doing now."""
        return self._unary(_calls.GET_LOAD, server_pb2.GetLoadRequest(), timeout)

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Whether the server takes requests. Raises ConnectionFailed where none answers.

        Of several servers: whether one of them does; False where none answers.
        """
        deadline = Deadline(timeout)
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_calls.HEALTH_CHECK_PATH)
        try:
            return _calls.is_serving(self._start(check, _calls.WHOLE_SERVER, deadline.remaining()))
        except grpc.RpcError as error:
            failure = error_from_rpc(error, self.address, deadline.passed())
            if isinstance(failure, Unavailable) and _target.names_several(self.address):
                return False  # The channel itself leaves out those that are not ready.
            raise failure from error

    def wait_until_ready(self, timeout: float) -> None:
        """Returns once the server takes requests; it need not be running yet.

        Raises DeadlineExceeded after `timeout` seconds.
        """
        deadline = Deadline(timeout)
        while not self._watch_until_ready(deadline.remaining()):
            time.sleep(_calls.RETRY_SECONDS)

    def _watch_until_ready(self, timeout: float | None) -> bool:
        """False: the server hung up before it was ready."""
        watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_calls.HEALTH_WATCH_PATH)
        call = self._start(watch, _calls.WHOLE_SERVER, timeout, wait_for_ready=True)
        try:
            for status in call:
                if _calls.is_serving(status):
                    return True
        except grpc.RpcError as error:
            failure = error_from_rpc(error, self.address)
            if isinstance(failure, DeadlineExceeded):
                raise _calls.not_ready(self.address) from error
            if not isinstance(failure, Unavailable):
                raise failure from error
        finally:
            call.cancel()
        return False

    def close(self) -> None:
        """Cancels what is in flight and closes the connection."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, operation: Operation[Response, Result], request: Message, timeout: float | None) -> Result:
        call = self._channel.unary_unary(operation.path, _calls.serialize, operation.response.FromString)
        retries = self._retries(timeout)
        while True:
            try:
                return operation.convert(self._start(call, request, retries.remaining()))
            except grpc.RpcError as error:
                failure = error_from_rpc(error, self.address, retries.passed())
                if (delay := retries.delay(error, failure)) is None:
                    raise failure from error
            time.sleep(delay)

    def _retries(self, timeout: float | None) -> Retries:
        return Retries(self._attempts, timeout, wait_for_room=self._wait_for_room)

    def _start(self, call: Callable[..., Any], request: object, timeout: float | None, **more: Any) -> Any:
        try:
            return call(request, timeout=timeout, metadata=self._metadata, **more)
        except ValueError:
            if self._closed:
                raise ClientClosed(self.address) from None
            raise
