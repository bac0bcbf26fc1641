"""Which tokens run in the next step. Pure Python: no torch, no clock of its own, no input or output.

Comes in: sequences (`submit`), aborts (`abort`), the time. Goes out: a `Step`, then, once it has run, what it brought
for each sequence (`complete`). A sequence's state is its tokens and how many of them are computed, that is, have their
keys and values in the cache; prefill, chunked prefill, decode and recomputation after a preemption are all "compute
the tokens that are not computed yet".

Order of a step's side effects: expired sequences end; running sequences get tokens and blocks, decodes first; where
blocks run out the youngest running sequence gives all of its own back and waits again (it is computed again later, from
prompt and output); then waiting sequences are admitted in the order of arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pellucid_server.engine.messages import Finished, FinishKind, Progress, Submit
from pellucid_server.kv.blocks import BlockPool


@dataclass(eq=False, slots=True)
class SequenceState:
    """One sequence from submission to its end."""

    request: Submit
    arrival: int
    tokens: list[int]
    """Prompt and output."""
    computed: int = 0
    """How many of `tokens`, from the left, have keys and values in the cache."""
    blocks: list[int] = field(default_factory=list)
    first_scheduled_at: float | None = None
    preemptions: int = 0

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def banned_ids(self) -> Sequence[int]:
        """Ids that may not be sampled next: end and stop tokens until min_new_tokens are out."""
        if self.output_count >= self.request.min_new_tokens:
            return ()
        return (*self.request.eos_ids, *self.request.stop_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a sequence, from its token `start` on. `samples`: the next token is to be sampled after it."""

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
    """

    def __init__(self, pool: BlockPool, max_running: int, max_step_tokens: int) -> None:
        if max_step_tokens < max_running:
            raise ValueError(f"max_step_tokens = {max_step_tokens} must be at least max_running = {max_running}")
        self.pool = pool
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.running: list[SequenceState] = []
        """In the order of arrival."""
        self.waiting: list[SequenceState] = []
        """In the order of arrival; the next to be admitted is the last, so that taking it is cheap."""
        self.preemptions = 0
        self._by_key: dict[int, SequenceState] = {}
        self._arrivals = 0
        self._expiries: list[tuple[float, int]] = []

    def submit(self, request: Submit) -> None:
        """Queue a sequence. It must be able to fit: at most max_length <= the pool's capacity tokens."""
        if not 1 <= len(request.prompt) + len(request.generated) <= self.pool.token_capacity:
            raise ValueError(f"sequence {request.key} can never run: {len(request.prompt)} prompt tokens")
        tokens = [*request.prompt, *request.generated]
        sequence = SequenceState(request, self._arrivals, tokens)
        self._arrivals += 1
        self._by_key[request.key] = sequence
        self.waiting.insert(0, sequence)
        for at in (request.deadline, request.time_limit_at):
            if at is not None:
                heapq.heappush(self._expiries, (at, request.key))

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

    @property
    def next_expiry(self) -> float | None:
        """When the next deadline or time limit may pass."""
        return self._expiries[0][0] if self._expiries else None

    @property
    def sequences(self) -> Iterator[SequenceState]:
        yield from self._by_key.values()

    def schedule(self, now: float) -> Step:
        """Choose the next step's chunks and give them their blocks."""
        expired = self._expire(now)
        planned: dict[int, Chunk] = {}
        budget = self.max_step_tokens
        decodes = [sequence for sequence in self.running if sequence.pending == 1]
        prefills = [sequence for sequence in self.running if sequence.pending > 1]
        for sequence in decodes + prefills:
            budget -= self._plan(sequence, budget, planned)
        while budget > 0 and self._may_admit():
            sequence = self.waiting.pop()
            self.running.append(sequence)
            budget -= self._plan(sequence, budget, planned)
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
        self.pool.check_integrity(sequence.blocks for sequence in self._by_key.values())
        places = sorted(sequence.request.key for sequence in self.running + self.waiting)
        if places != sorted(self._by_key):
            raise RuntimeError(f"sequences {sorted(self._by_key)} are queued as {places}")

    def _plan(self, sequence: SequenceState, budget: int, planned: dict[int, Chunk]) -> int:
        """Add the sequence's chunk to the plan -> tokens spent, less those of sequences it pushed out of the plan."""
        count = min(sequence.pending, budget)
        if count <= 0 or sequence not in self.running:
            return 0
        need = self.pool.blocks_for(sequence.computed + count) - len(sequence.blocks)
        spent = 0
        while need > self.pool.free:
            victim = self.running[-1]
            chunk = planned.pop(victim.request.key, None)
            spent -= chunk.count if chunk else 0
            self._preempt(victim)
            if victim is sequence:
                return spent
        sequence.blocks += self.pool.allocate(need)
        samples = count == sequence.pending and sequence.request.max_new_tokens > 0
        planned[sequence.request.key] = Chunk(sequence, sequence.computed, count, samples)
        return spent + count

    def _may_admit(self) -> bool:
        """The next waiting sequence starts only where all it has to compute fits, so that it is not pushed out at once.

        It is not overtaken by smaller ones behind it: it would wait for ever.
        """
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        return self.pool.blocks_for(len(self.waiting[-1].tokens)) <= self.pool.free

    def _preempt(self, sequence: SequenceState) -> None:
        """Take all blocks away; the sequence waits at the front, for whatever runs is older than whatever waits."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
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
        self.pool.release(sequence.blocks)
        sequence.blocks = []

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
        if len(sequence.tokens) + 1 >= min(request.max_length, self.pool.token_capacity):
            return Finished("context_full")
        return None


def _progress(sequence: SequenceState, token: int | None, finished: Finished | None) -> Progress:
    first = sequence.first_scheduled_at
    return Progress(sequence.request.key, token, finished, first, sequence.preemptions)
