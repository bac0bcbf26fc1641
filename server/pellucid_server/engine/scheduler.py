"""Which tokens run in the next step. Pure Python: no torch, no clock of its own, no input or output.

Comes in: sequences (`submit`), aborts (`abort`), the time. Goes out: a `Step`, then, once it has run, what it brought
for each sequence (`complete`). A sequence's state is its tokens and how many of them are computed, that is, have their
keys and values in the cache; prefill, chunked prefill, decode, recomputation after a preemption and after the move of a
re-encoded window are all "compute the tokens that are not computed yet".

Under a re-encoded window (kv/window.py) the cache holds a *view* of the sequence: its sinks and what follows the
origin, `offset` tokens in between left out. Chunks and positions count in the view. Without such a window the view is
the sequence.

Order of a step's side effects: expired sequences end; running sequences get tokens and blocks, decodes first, then
prompts in the order of arrival, each leaving a small share of the budget to those behind it, so that a long prompt
holds nobody up; where blocks run out the youngest running sequence gives all of its own back and waits again (it is
computed again later, from prompt and output); then waiting sequences are admitted in the order of arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from pellucid_server.engine.messages import Finished, FinishKind, Progress, Submit
from pellucid_server.kv.blocks import BlockPool

QUANTUM_SHARE = 4
"""A quarter of what decodes leave of the budget is kept for prompts behind the oldest one, in equal parts."""
FREED = -1
"""In a block table: the block has gone back to the pool, and no row looks there any more."""


@dataclass(eq=False, slots=True)
class SequenceState:
    """One sequence from submission to its end."""

    request: Submit
    arrival: int
    max_length: int
    """The request's, or what the whole pool holds where that is less and no window makes up for it."""
    tokens: list[int]
    """Prompt and output."""
    offset: int = 0
    """Tokens left out of the view, behind the sinks."""
    computed: int = 0
    """How many tokens of the view, from the left, have keys and values in the cache."""
    blocks: list[int] = field(default_factory=list)
    """The block table; FREED where a window has passed a block by."""
    freed: int = 0
    """How many blocks of the table are FREED: a run behind those of the sinks."""
    first_scheduled_at: float | None = None
    preemptions: int = 0

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def view_length(self) -> int:
        return len(self.tokens) - self.offset

    @property
    def pending(self) -> int:
        """Tokens of the view still to be computed."""
        return self.view_length - self.computed

    @property
    def held_blocks(self) -> list[int]:
        return [block for block in self.blocks if block != FREED]

    def view(self, start: int, count: int) -> list[int]:
        """Tokens of the view from its place `start` on."""
        sinks, offset = self.request.context.sinks, self.offset
        if offset == 0 or start >= sinks:
            return self.tokens[start + offset : start + offset + count]
        return (self.tokens[:sinks] + self.tokens[sinks + offset :])[start : start + count]

    @property
    def banned_ids(self) -> Sequence[int]:
        """Ids that may not be sampled next: end and stop tokens until min_new_tokens are out."""
        if self.output_count >= self.request.min_new_tokens:
            return ()
        return (*self.request.eos_ids, *self.request.stop_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence's view, from its place `start` on. `samples`: the next token is sampled after it."""

    sequence: SequenceState
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Chunks to run together, at most one per sequence, and sequences that ended before it."""

    chunks: list[Chunk]
    expired: list[Progress]

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Continuous batching over a block pool.

    max_running      sequences that may hold blocks at once
    max_step_tokens  token budget of a step, at least max_running, so that every decode moves in every step
    native_window    the widest window of a model all of whose layers have one, so that older blocks can go; else 0
    """

    def __init__(self, pool: BlockPool, max_running: int, max_step_tokens: int, native_window: int = 0) -> None:
        if max_step_tokens < max_running:
            raise ValueError(f"max_step_tokens = {max_step_tokens} must be at least max_running = {max_running}")
        self.pool = pool
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.native_window = native_window
        self.running: list[SequenceState] = []
        """In the order of arrival."""
        self.waiting: list[SequenceState] = []
        """In the order of arrival; the next to be admitted is the last, so that taking it is cheap."""
        self.preemptions = 0
        self._by_key: dict[int, SequenceState] = {}
        self._arrivals = 0
        self._expiries: list[tuple[float, int]] = []

    def submit(self, request: Submit) -> None:
        """Queue a sequence. Raises ValueError where the whole pool could not hold its tokens or their window."""
        tokens = [*request.prompt, *request.generated]
        if not tokens or self._blocks_needed(request, len(tokens)) > self.pool.count:
            raise ValueError(f"sequence {request.key} can never run: {len(tokens)} tokens, {self.pool.count} blocks")
        fits = self._blocks_needed(request, request.max_length) <= self.pool.count
        max_length = request.max_length if fits else self.pool.token_capacity
        sequence = SequenceState(request, self._arrivals, max_length, tokens)
        self._arrivals += 1
        self._by_key[request.key] = sequence
        self.waiting.insert(0, sequence)
        for at in (request.deadline, request.time_limit_at):
            if at is not None:
                heapq.heappush(self._expiries, (at, request.key))
        if len(self._expiries) > 64 + 4 * len(self._by_key):  # most are of sequences that have ended long before
            self._expiries = [(at, key) for at, key in self._expiries if key in self._by_key]
            heapq.heapify(self._expiries)

    def abort(self, key: int) -> bool:
        """Forget a sequence in whatever state; False where it is unknown."""
        sequence = self._by_key.get(key)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    @property
    def idle(self) -> bool:
        return not self._by_key

    def schedule(self, now: float) -> Step:
        """Choose the next step's chunks and give them their blocks."""
        expired = self._expire(now)
        planned: dict[int, Chunk] = {}
        budget = self.max_step_tokens
        for sequence in self.running:
            self._move_window(sequence)
        decodes = [sequence for sequence in self.running if sequence.pending == 1]
        prefills = [sequence for sequence in self.running if sequence.pending > 1]
        for sequence in decodes:
            budget -= self._plan(sequence, budget, planned)
        behind = len(prefills) + self._newcomers()
        quantum = max(1, budget // QUANTUM_SHARE // max(1, behind - 1))
        for sequence in prefills:
            behind -= 1
            budget -= self._plan(sequence, max(1, budget - quantum * behind), planned)
        while budget > 0 and self._may_admit():
            sequence = self.waiting.pop()
            self._move_window(sequence)
            self.running.append(sequence)
            behind -= 1
            budget -= self._plan(sequence, max(1, budget - quantum * max(0, behind)), planned)
        for chunk in planned.values():
            if chunk.sequence.first_scheduled_at is None:
                chunk.sequence.first_scheduled_at = now
        return Step(list(planned.values()), expired)

    def complete(self, step: Step, sampled: Sequence[int | None]) -> list[Progress]:
        """Book a step that has run; `sampled` holds one token, or None for non-finite logits, per sampling chunk."""
        tokens = iter(sampled)
        progress = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            token = next(tokens) if chunk.samples else None
            finished = self._finished(sequence, chunk, token)
            if token is None and finished is None:
                continue
            if token is not None:
                sequence.tokens.append(token)
            progress.append(_progress(sequence, token, finished))
            if finished is not None:
                self._remove(sequence)
        return progress

    def check_integrity(self) -> None:
        """Raise RuntimeError where blocks are lost or shared, or a sequence is in two places."""
        self.pool.check_integrity(sequence.held_blocks for sequence in self._by_key.values())
        places = sorted(sequence.request.key for sequence in self.running + self.waiting)
        if places != sorted(self._by_key):
            raise RuntimeError(f"sequences {sorted(self._by_key)} are queued as {places}")

    def _plan(self, sequence: SequenceState, budget: int, planned: dict[int, Chunk]) -> int:
        """Add the sequence's chunk to the plan -> tokens spent, less those of sequences it pushed out of the plan."""
        if budget <= 0 or sequence not in self.running:
            return 0
        spent = 0
        while self._room(sequence) < 1:
            victim = self.running[-1]
            chunk = planned.pop(victim.request.key, None)
            spent -= chunk.count if chunk else 0
            self._preempt(victim)
            if victim is sequence:
                return spent
        count = min(sequence.pending, budget, self._room(sequence))
        missing = self.pool.blocks_for(sequence.computed + count) - len(sequence.blocks)
        sequence.blocks += self.pool.allocate(max(0, missing))
        samples = count == sequence.pending and sequence.request.max_new_tokens > 0
        planned[sequence.request.key] = Chunk(sequence, sequence.computed, count, samples)
        return spent + count

    def _room(self, sequence: SequenceState) -> int:
        """Tokens that the sequence can compute in the blocks it holds and those that are free.

        A chunk shrinks to this rather than push others out: they make room only where there is none for one token.
        """
        return (len(sequence.blocks) + self.pool.free) * self.pool.block_size - sequence.computed

    def _blocks_needed(self, request: Submit, length: int) -> int:
        return request.context.blocks_needed(length, self.pool.block_size, self.native_window)

    def _move_window(self, sequence: SequenceState) -> None:
        """Let the window follow the sequence's last token: move a re-encoded view, or free what has rolled out."""
        context = sequence.request.context
        offset = context.offset(len(sequence.tokens) - 1)
        if offset != sequence.offset:
            sequence.offset = offset
            if sequence.freed:
                self._release(sequence)
                sequence.computed = 0
            # The sinks keep their positions and see only each other, so they stay as they are.
            sequence.computed = min(sequence.computed, context.sinks)
        kept_from, sinks = context.first_kept(sequence.computed), context.sinks
        if self.native_window:
            kept_from, sinks = max(kept_from, sequence.computed - self.native_window + 1), 0
        begin = self.pool.blocks_for(sinks) + sequence.freed
        passed = slice(begin, min(kept_from // self.pool.block_size, len(sequence.blocks)))
        if passed.start < passed.stop:
            count = passed.stop - passed.start
            self.pool.release(sequence.blocks[passed])
            sequence.blocks[passed] = [FREED] * count
            sequence.freed += count

    def _newcomers(self) -> int:
        """Waiting sequences that could join this step."""
        return min(len(self.waiting), self.max_running - len(self.running)) if self._may_admit() else 0

    def _may_admit(self) -> bool:
        """The next waiting sequence starts only where all it has to compute fits, so that it is not pushed out at once.

        It is not overtaken by smaller ones behind it: it would wait for ever.
        """
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        sequence = self.waiting[-1]
        return self._blocks_needed(sequence.request, len(sequence.tokens)) <= self.pool.free

    def _preempt(self, sequence: SequenceState) -> None:
        """Take all blocks away; the sequence waits at the front, for whatever runs is older than whatever waits."""
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.running.remove(sequence)
        self.waiting.append(sequence)

    def _expire(self, now: float) -> list[Progress]:
        expired = []
        while self._expiries and self._expiries[0][0] <= now:
            _, key = heapq.heappop(self._expiries)
            sequence = self._by_key.get(key)
            if sequence is None:
                continue
            deadline = sequence.request.deadline
            kind: FinishKind = "deadline" if deadline is not None and deadline <= now else "time_limit"
            self._remove(sequence)
            expired.append(_progress(sequence, None, Finished(kind)))
        return expired

    def _remove(self, sequence: SequenceState) -> None:
        del self._by_key[sequence.request.key]
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def _release(self, sequence: SequenceState) -> None:
        self.pool.release(sequence.held_blocks)
        sequence.blocks = []
        sequence.freed = 0

    def _finished(self, sequence: SequenceState, chunk: Chunk, token: int | None) -> Finished | None:
        """Whether the sequence ends with this token, and why. Tokens that end it win over the limits they reach."""
        request = sequence.request
        if not chunk.samples:
            done = request.max_new_tokens == 0 and sequence.pending == 0
            return Finished("max_new_tokens") if done else None
        if token is None:
            return Finished("non_finite")
        if token in request.eos_ids:
            return Finished("eos", token)
        if token in request.stop_ids:
            return Finished("stop_token", token)
        if sequence.output_count + 1 >= request.max_new_tokens:
            return Finished("max_new_tokens")
        if len(sequence.tokens) + 1 >= sequence.max_length:
            return Finished("context_full")
        return None


def _progress(sequence: SequenceState, token: int | None, finished: Finished | None) -> Progress:
    first = sequence.first_scheduled_at
    return Progress(sequence.request.key, token, finished, first, sequence.preemptions)
