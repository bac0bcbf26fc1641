"""The buffer between a request's progress and its stream: what has arrived since the last write, as one delta.

Tokens come in from the engine's reader, which never waits; the stream's writer takes everything at once when it can
write. So a slow reader gets fewer, larger messages, and the buffer tells when it is too slow.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field


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


@dataclass
class Batch:
    """What one message carries."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_count: int = 0


class Outbox:
    """Coalesces deltas. Adding never waits; `wait` returns when there is something to write or all is over."""

    def __init__(self, rules: DeliveryRules, patience: Patience = DEFAULT_PATIENCE) -> None:
        self._rules = rules
        self._patience = patience
        self._pending = Batch()
        self._bytes = 0
        self._first_sent = False
        self._closed = False
        self._ready = asyncio.Event()
        self._write_began: float | None = None
        self._writer: asyncio.Task[object] | None = None

    def add(self, token_id: int | None, text: str) -> None:
        """A step's outcome for the request: at most one token, and the text it completed."""
        if token_id is not None:
            self._pending.token_count += 1
            if self._rules.with_token_ids:
                self._pending.token_ids.append(token_id)
                self._bytes += 4
        if text and self._rules.with_text:
            self._pending.texts.append(text)
            self._bytes += len(text.encode())
        if self._is_due():
            self._ready.set()

    def close(self) -> None:
        """Nothing more comes; what pends may go."""
        self._closed = True
        self._ready.set()

    async def wait(self) -> None:
        """Returns when a message is due or the outbox is closed."""
        await self._ready.wait()

    def take(self) -> Batch:
        """Everything that pends. The write of it begins now and lasts until `written`."""
        batch, self._pending = self._pending, Batch()
        self._bytes = 0
        self._first_sent = True
        if not self._closed:
            self._ready.clear()
        self._write_began = time.monotonic()
        self._writer = asyncio.current_task()
        return batch

    def written(self) -> None:
        self._write_began = None

    def interrupt(self) -> None:
        """Ends the wait for a reader that does not read: the write, if one lasts, is cancelled."""
        if self._write_began is not None and self._writer is not None:
            self._writer.cancel()

    def is_stalled(self, now: float) -> bool:
        """Whether the reader is so slow that the request should end."""
        if self._write_began is None:
            return False
        return self._bytes > self._patience.bytes and now - self._write_began > self._patience.seconds

    def _is_due(self) -> bool:
        if self._rules.final_only or not self._pending.token_count:
            return False
        if not self._first_sent:
            return True
        has_content = bool(self._pending.token_ids or self._pending.texts)
        return has_content and self._pending.token_count >= self._rules.min_tokens
