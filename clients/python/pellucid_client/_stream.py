"""What the sync and the asyncio stream share: the running sum of an answer's messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from pellucid.v1 import inference_pb2
from pellucid_client._retry import Retries
from pellucid_client.errors import Cancelled, InternalError, PellucidError
from pellucid_client.results import Chunk, Completion, Finish, Output, PromptInfo, Timings, TokenLogprob, Usage


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
        self._outputs: dict[int, _Sum] = {}
        self._prompt_message: inference_pb2.PromptInfo | None = None
        self._prompt: PromptInfo | None = None
        """Made of it once somebody asks: few do, and it takes longer than a chunk."""
        self._usage: Usage | None = None
        self._timings: Timings | None = None

    @property
    def prompt(self) -> PromptInfo | None:
        """What the server made of the request; None before the first chunk."""
        if self._prompt is None and self._prompt_message is not None:
            self._prompt = PromptInfo.from_message(self._prompt_message)
        return self._prompt

    @property
    def text(self) -> str:
        """The text so far, of the first sequence."""
        return self._sum(0).text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids so far, of the first sequence."""
        return tuple(self._sum(0).token_ids)

    @property
    def finish(self) -> Finish | None:
        """Why the first sequence ended; None before its last chunk."""
        return self._sum(0).finish

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Every sequence so far, in their order."""
        return tuple(self._outputs[index].output() for index in sorted(self._outputs))

    @property
    def usage(self) -> Usage | None:
        """None before the last chunk."""
        return self._usage

    @property
    def timings(self) -> Timings | None:
        """None before the last chunk."""
        return self._timings

    def cancel(self) -> None:
        """Ends the request in the server. Reading on raises Cancelled; after the end it does nothing."""
        self._cancelled.set()
        self._call.cancel()

    @property
    def _is_whole(self) -> bool:
        """Whether the last message has come. A connection that breaks after it takes nothing from the answer."""
        return self._usage is not None

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
            self._usage = Usage.from_message(message.usage)
        if message.HasField("timings"):
            self._timings = Timings.from_message(message.timings)
        for output in message.outputs:
            chunk = Chunk.from_message(output)
            self._sum(chunk.index).add(chunk)
            self._chunks.append(chunk)

    def _sum(self, index: int) -> _Sum:
        found = self._outputs.get(index)
        if found is None:
            found = self._outputs[index] = _Sum()
        return found

    def _completion(self) -> Completion:
        """The whole answer, once the stream has ended. Raises InternalError where its end is missing."""
        prompt = self.prompt
        if prompt is None or self.finish is None or self._usage is None or self._timings is None:
            raise InternalError("the stream ended without prompt, finish, usage or timings; is this a Pellucid server?")
        return Completion(self.outputs, self.finish, prompt, self._usage, self._timings)


@dataclass
class _Sum:
    """One sequence so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.finish = chunk.finish or self.finish

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def output(self) -> Output:
        return Output(self.text, tuple(self.token_ids), self.finish, tuple(self.logprobs))


def cancelled_here() -> Cancelled:
    return Cancelled("the stream was cancelled", code=grpc.StatusCode.CANCELLED)
