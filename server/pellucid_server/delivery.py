"""The buffer between a request's progress and its stream: what has arrived since the last write, sequence by sequence.

Tokens come in from the engine's reader, which never waits; the stream's writer takes everything at once when it can
write, up to what fits into a message. So a slow reader gets fewer, larger messages, and the buffer tells when it is too
slow. Tokens that come faster than anybody could see gather, too (pace.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pellucid_server.ends import End
from pellucid_server.engine.messages import TokenLogprob
from pellucid_server.pace import Pace

MAX_MESSAGE_BYTES = 16 * 2**20
"""Of one message, in either direction."""
FULL_BYTES = MAX_MESSAGE_BYTES // 4
"""Of a batch to which nothing more is added. Byte counts are rough, and the first message tells of the prompt, too."""
TOKEN_BYTES = 4
LOGPROB_BYTES = 24
"""Of a log-probability with its token, roughly; and of each alternative."""


@dataclass(frozen=True)
class Patience:
    """A write that takes longer than `seconds`, while more than `bytes` wait behind it, ends the request."""

    seconds: float = 60.0
    bytes: int = 2**20


DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True)
class DeliveryRules:
    """How a stream is cut into messages and what they hold; see OutputOptions."""

    final_only: bool = False
    min_tokens: int = 1
    with_text: bool = True
    with_token_ids: bool = True
    paced: bool = False
    """Messages keep a gap; the first one, ends and full ones do not wait for it."""


@dataclass(slots=True)
class Output:
    """What is new of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: End | None = None
    token_count: int = 0
    """With `end`: tokens of the whole sequence."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_content(self) -> bool:
        return bool(self.token_ids or self.texts or self.logprobs)


@dataclass(slots=True)
class Batch:
    """What one message carries."""

    outputs: dict[int, Output] = field(default_factory=dict)
    """By sequence index; those that have something new."""
    token_count: int = 0
    byte_count: int = 0
    has_end: bool = False

    def output(self, index: int) -> Output:
        output = self.outputs.get(index)
        if output is None:
            output = self.outputs[index] = Output()
        return output


class Outbox:
    """Coalesces deltas. Adding never waits; `wait` returns when there is something to write or all is over."""

    def __init__(self, rules: DeliveryRules, patience: Patience = DEFAULT_PATIENCE, pace: Pace | None = None) -> None:
        self._rules = rules
        self._patience = patience
        self._pace = pace if pace is not None else Pace()
        self._full: deque[Batch] = deque()
        """Older than what pends, and complete."""
        self._pending = Batch()
        self._held = False
        self._first_sent = False
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = 0.0
        """Until when what pends may gather; 0: no longer."""
        self._write_began: float | None = None
        self._writer: asyncio.Task[object] | None = None

    def add(
        self, token_ids: Sequence[int], text: str, *, index: int = 0, logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """What came of a sequence: tokens, perhaps none, and the text they completed."""
        pending = self._pending
        output = pending.output(index)
        pending.token_count += len(token_ids)
        if self._rules.with_token_ids:
            output.token_ids += token_ids
            pending.byte_count += TOKEN_BYTES * len(token_ids)
        for logprob in logprobs:
            output.logprobs.append(logprob)
            pending.byte_count += LOGPROB_BYTES * (1 + len(logprob.alternatives))
        if text and self._rules.with_text:
            output.texts.append(text)
            pending.byte_count += len(text.encode())
        if pending.byte_count >= FULL_BYTES and not self._rules.final_only:
            self._full.append(pending)
            self._pending = Batch()
        self._wake_if_due()

    def end(self, index: int, end: End, token_count: int) -> None:
        """A sequence is over."""
        output = self._pending.output(index)
        output.end, output.token_count = end, token_count
        self._pending.has_end = True
        self._wake_if_due()

    def hold(self) -> None:
        """No message may go before `release`: something belongs into the first one that has not come yet."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self._wake_if_due()

    def close(self) -> None:
        """Nothing more comes; what pends may go."""
        if self._rules.paced and self._first_sent and not self._closed:
            self._pace.streams -= 1
        self._closed = True
        self._wake_if_due()

    async def wait(self) -> None:
        """Returns when a message is due or the outbox is closed."""
        if time.monotonic() >= self._next_at:
            self._next_at = 0.0
        if not self._is_due() or self._is_early():
            self._waiter = asyncio.get_running_loop().create_future()
            self._wake_if_due()
            await self._waiter

    def take(self) -> Batch:
        """What pends, or as much of it as goes into a message. The write of it begins now and lasts until `written`."""
        if self._full:
            batch = self._full.popleft()
        else:
            batch, self._pending = self._pending, Batch()
        self._write_began = time.monotonic()
        if self._rules.paced:
            self._begin_gap(self._write_began)
        self._first_sent = True
        self._writer = asyncio.current_task()
        return batch

    @property
    def is_paced(self) -> bool:
        """Whether it has several messages, which keep a gap."""
        return self._rules.paced and not self._rules.final_only

    @property
    def is_eager(self) -> bool:
        """Whether the caller has asked for each token as it comes."""
        return self._rules.min_tokens == 1 and not (self._rules.paced or self._rules.final_only)

    @property
    def has_more(self) -> bool:
        """Whether something pends."""
        return bool(self._full or self._pending.outputs)

    def written(self) -> None:
        self._write_began = None

    def interrupt(self) -> None:
        """Ends the wait for a reader that does not read: the write, if one lasts, is cancelled."""
        if self._write_began is not None and self._writer is not None:
            self._writer.cancel()

    def is_stalled(self, now: float) -> bool:
        """Whether the reader is so slow that the request should end."""
        if self._write_began is None or not now - self._write_began > self._patience.seconds:
            return False
        return sum(batch.byte_count for batch in (*self._full, self._pending)) > self._patience.bytes

    @property
    def is_overfull(self) -> bool:
        """Whether the one message that is to carry everything is too large by now, however small its parts turn out."""
        return self._rules.final_only and self._pending.byte_count > 4 * MAX_MESSAGE_BYTES

    def _wake_if_due(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._is_due():
            return
        if not self._is_early():
            waiter.set_result(None)
        elif self._timer is None:
            # Should no step come by then, what pends goes without one.
            self._timer = waiter.get_loop().call_at(self._next_at + self._pace.gap / 2, self._gap_is_over)

    def _begin_gap(self, now: float) -> None:
        if not self._first_sent and not self._closed:
            self._pace.streams += 1
        self._next_at = self._pace.gap_end(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _gap_is_over(self) -> None:
        self._timer = None
        self._next_at = 0.0
        self._wake_if_due()

    def _is_early(self) -> bool:
        """Whether a message that is due can wait for more."""
        return self._pace.due < self._next_at and not (self._closed or self._full or self._pending.has_end)

    def _is_due(self) -> bool:
        pending = self._pending
        if self._closed:
            return True
        if self._rules.final_only or self._held:
            return False
        if self._full:
            return True
        if not (pending.token_count or pending.has_end):
            return False
        if not self._first_sent or pending.has_end:
            return True
        return pending.byte_count > 0 and pending.token_count >= self._rules.min_tokens
