"""What the sync and the asyncio stream share: the running sum of an answer's messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import grpc

from pellucid.v1 import inference_pb2
from pellucid_client._retry import Retries
from pellucid_client.errors import Cancelled, InternalError, PellucidError
from pellucid_client.results import Chunk, Completion, Finish, Output, PromptInfo, Timings, Usage


class _Call(Protocol):
    def cancel(self) -> object: ...


class _Event(Protocol):
    def set(self) -> object: ...
    def is_set(self) -> bool: ...


class StreamBase:
    """What has arrived of one answer so far, and the attempts to get it.

    start      begins an attempt that may take so many seconds
    retries    what is left to this call
    cancelled  set by cancel(); the sync and the asyncio stream wait for it between attempts, each in its own way
    """

    def __init__(
        self, start: Callable[[float | None], _Call], retries: Retries, address: str, cancelled: _Event
    ) -> None:
        self._start = start
        self._retries = retries
        self._address = address
        self._cancelled = cancelled
        self._call = start(retries.remaining())
        self._began = False
        self._chunks: deque[Chunk] = deque()
        """Those of messages that have come and been counted, not handed out yet."""
        self._outputs: dict[int, list[Chunk]] = {}
        """All of them, by sequence."""
        self._prompt_message: inference_pb2.PromptInfo | None = None
        self._usage_message: inference_pb2.Usage | None = None
        self._timings_message: inference_pb2.Timings | None = None
        self._prompt: PromptInfo | None = None
        """Made of its message, like usage and timings, once somebody asks: few do, and it takes longer than a chunk."""

    @property
    def prompt(self) -> PromptInfo | None:
        """What the server made of the request; None before the first chunk."""
        if self._prompt is None and self._prompt_message is not None:
            self._prompt = PromptInfo.from_message(self._prompt_message)
        return self._prompt

    @property
    def text(self) -> str:
        """The text so far, of the first sequence."""
        return _text(self._outputs.get(0, ()))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids so far, of the first sequence."""
        return _token_ids(self._outputs.get(0, ()))

    @property
    def finish(self) -> Finish | None:
        """Why the first sequence ended; None before its last chunk."""
        return _finish(self._outputs.get(0, ()))

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Every sequence so far, in their order."""
        return tuple(_output(self._outputs[index]) for index in sorted(self._outputs))

    @property
    def usage(self) -> Usage | None:
        """None before the last chunk."""
        return None if self._usage_message is None else Usage.from_message(self._usage_message)

    @property
    def timings(self) -> Timings | None:
        """None before the last chunk."""
        return None if self._timings_message is None else Timings.from_message(self._timings_message)

    def cancel(self) -> None:
        """Ends the request in the server. Reading on raises Cancelled; after the end it does nothing."""
        self._cancelled.set()
        self._call.cancel()

    @property
    def _is_whole(self) -> bool:
        """Whether the last message has come. A connection that breaks after it takes nothing from the answer."""
        return self._usage_message is not None

    def _restart(self) -> None:
        """Begins the next attempt."""
        self._call = self._start(self._retries.remaining())
        if self._cancelled.is_set():  # cancel() on another thread may have seen the attempt before.
            self._call.cancel()

    def _delay(self, error: grpc.RpcError, failure: PellucidError) -> float | None:
        """Seconds until the next attempt; None: there is none, the stream has begun or `failure` is final."""
        return None if self._began else self._retries.delay(error, failure)

    def _take(self, message: inference_pb2.GenerateResponse) -> None:
        """Counts a message and queues its chunks."""
        self._began = True
        if message.HasField("prompt"):
            self._prompt_message = message.prompt
        if message.HasField("usage"):
            self._usage_message = message.usage
        if message.HasField("timings"):
            self._timings_message = message.timings
        for output in message.outputs:
            chunk = Chunk.from_message(output)
            self._outputs.setdefault(chunk.index, []).append(chunk)
            self._chunks.append(chunk)

    def _completion(self) -> Completion:
        """The whole answer, once the stream has ended. Raises InternalError where its end is missing."""
        prompt, finish, usage, timings = self.prompt, self.finish, self.usage, self.timings
        if prompt is None or finish is None or usage is None or timings is None:
            raise InternalError("the stream ended without prompt, finish, usage or timings; is this a Pellucid server?")
        return Completion(self.outputs, finish, prompt, usage, timings)


def _text(chunks: Sequence[Chunk]) -> str:
    return "".join([chunk.text for chunk in chunks])


def _token_ids(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(chunk.token_ids for chunk in chunks))


def _finish(chunks: Sequence[Chunk]) -> Finish | None:
    return chunks[-1].finish if chunks else None


def _output(chunks: Sequence[Chunk]) -> Output:
    """One sequence so far."""
    logprobs = tuple(chain.from_iterable(chunk.logprobs for chunk in chunks))
    return Output(_text(chunks), _token_ids(chunks), _finish(chunks), logprobs)


def cancelled_here() -> Cancelled:
    return Cancelled("the stream was cancelled", code=grpc.StatusCode.CANCELLED)
