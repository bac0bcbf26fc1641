"""The synchronous client.

    >>> from pellucid_client import Client
    >>> with Client("127.0.0.1:50051") as client:
    ...     for chunk in client.generate("今天天气", temperature=0.7, seed=1):
    ...         print(chunk.text, end="", flush=True)

Errors are those of pellucid_client.errors. One client may be used from many threads at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message

from pellucid.v1 import inference_pb2, model_pb2, server_pb2
from pellucid_client import _calls
from pellucid_client._calls import Operation, Response, Result
from pellucid_client._requests import (
    DetokenizeOptions,
    GenerateOptions,
    TokenizeOptions,
    cancel_request,
    detokenize_request,
    generate_request,
    model_request,
    tokenize_request,
)
from pellucid_client._stream import StreamBase
from pellucid_client.errors import DeadlineExceeded, Unavailable, error_from_rpc
from pellucid_client.results import Chunk, Completion, Load, Model, ServerInfo, Tokenization


class GenerateStream(StreamBase):
    """An answer as it is made: iterate over its chunks, or take the whole with `result()`.

    As a context manager it cancels the request where the block is left before the end:

        >>> with client.generate("今天天气") as stream:
        ...     for chunk in stream:
        ...         if "。" in chunk.text:
        ...             break
    """

    def __init__(self, call: Any, address: str) -> None:
        super().__init__(call, address)
        self._messages: Iterator[inference_pb2.GenerateResponse] = call

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            message = next(self._messages)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from error
        return self._take(message)

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
    """A connection to one Pellucid server; close it, or use it as a context manager.

    address      HOST:PORT, or any gRPC target
    credentials  for TLS, such as grpc.ssl_channel_credentials(); None: plain text
    metadata     sent with every call, such as (("traceparent", "…"),)
    """

    def __init__(
        self,
        address: str = _calls.DEFAULT_ADDRESS,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.address = address
        self._metadata = tuple(metadata)
        options = _calls.channel_options(address)
        self._channel = (
            grpc.insecure_channel(address, options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options)
        )

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> GenerateStream:
        """Continues `prompt`, a text or token ids. Options left out take the server's defaults; see GenerateOptions.

        >>> answer = client.generate("今天天气", max_new_tokens=20, stop=["。"]).result()
        >>> answer.text, answer.finish.reason, answer.usage.output_token_count
        """
        request = generate_request(prompt, options)
        call = self._channel.unary_stream(
            _calls.GENERATE_PATH, _calls.serialize, inference_pb2.GenerateResponse.FromString
        )
        return GenerateStream(call(request, timeout=options.get("timeout"), metadata=self._metadata), self.address)

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
        """Whether the server takes requests. Raises ConnectionFailed where none answers."""
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_calls.HEALTH_CHECK_PATH)
        try:
            return _calls.is_serving(check(_calls.WHOLE_SERVER, timeout=timeout, metadata=self._metadata))
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from error

    def wait_until_ready(self, timeout: float) -> None:
        """Returns once the server takes requests; it need not be running yet.

        Raises DeadlineExceeded after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._watch_until_ready(deadline - time.monotonic()):
            time.sleep(_calls.RETRY_SECONDS)

    def _watch_until_ready(self, timeout: float) -> bool:
        """False: the server hung up before it was ready."""
        watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_calls.HEALTH_WATCH_PATH)
        call: Any = watch(_calls.WHOLE_SERVER, timeout=max(0.0, timeout), metadata=self._metadata, wait_for_ready=True)
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
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, operation: Operation[Response, Result], request: Message, timeout: float | None) -> Result:
        call = self._channel.unary_unary(operation.path, _calls.serialize, operation.response.FromString)
        try:
            response = call(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from error
        return operation.convert(response)
