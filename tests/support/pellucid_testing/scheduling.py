"""A scheduler without a model: steps are "run" on blocks that remember what was written to them.

Each slot of each block holds a number that stands for the token there and everything its keys and values depend on.
Before a row may look at a slot, what is there is held against what the row's own sequence says it should be. So a block
that was reused wrongly, copied wrongly, or written to while others relied on it is seen at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from pellucid_server.engine.messages import Progress, Sampling, Submit, TokenLogprob
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import Chunk, Sampled, SequenceState, Step
from pellucid_server.kv.blocks import BlockPool

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
EOS, STOP, NAN, LATE_NAN = 7, 8, 9, 10
LATE = 3
"""Tokens that come of a prompt with LATE_NAN before its logits are not finite; of one with NAN, none do."""


def submit(key: int, prompt: int | list[int], new: int, **extra: object) -> Submit:
    values: dict[str, object] = {"min_new_tokens": 0, "eos_ids": [EOS], "stop_ids": [STOP], "max_length": 10_000}
    values |= extra
    tokens = [100 + key] * prompt if isinstance(prompt, int) else prompt
    return Submit(key=key, prompt=tokens, sampling=GREEDY, max_new_tokens=new, **values)  # type: ignore[arg-type]


def next_token(key: int, output_count: int) -> int:
    """The token that a "model" gives to a sequence, a function of the sequence alone; ends some of them early.

    Every second sequence repeats itself, with a slip now and then, so that drafts come true in part.
    """
    phase = output_count % 5 if key % 2 and output_count % 13 else output_count
    value = (key * 7919 + phase * 104729) % 97
    return EOS if value == 3 else STOP if value == 5 else 1000 + value


def broken_at(request: Submit, output_count: int) -> bool:
    """Whether the sequence's logits are not finite behind so many tokens of output."""
    return NAN in request.prompt or (LATE_NAN in request.prompt and output_count >= LATE)


def expected_output(request: Submit, capacity: int) -> list[int]:
    """What the sequence must give, whatever its company; `capacity`: tokens that prompt and output may come to."""
    output: list[int] = []
    while len(output) < request.max_new_tokens:
        token = next_token(request.key, len(output))
        if broken_at(request, len(output)):
            break
        output.append(token)
        if token in (EOS, STOP) or len(request.prompt) + len(output) >= min(request.max_length, capacity):
            break
    return output


def contents(chunk: Chunk, native_window: int) -> list[int]:
    """What the slots of a sequence's view, and of its draft, should hold.

    A rolling window no narrower than the model's own changes none.
    Salts do not change keys and values, but they make blocks strangers to each other.
    """
    sequence, request = chunk.sequence, chunk.sequence.request
    value = hash(request.cache_salt)
    rolls = request.context.kind == "roll" and not 0 < native_window <= request.context.window
    values = []
    known = sequence.view(0, sequence.view_length if not chunk.draft else chunk.start + chunk.count)
    for place, token in enumerate([*known, *chunk.draft]):
        policy = request.context if rolls and place >= request.context.span else None
        value = hash((value, token, policy))
        values.append(value)
    return values


def visible(sequence: SequenceState, place: int, native_window: int) -> list[int]:
    """Places of the view that the row at `place` looks at."""
    context = sequence.request.context
    first = place - context.window + 1 if context.kind == "roll" else 0
    first = max(first, place - native_window + 1) if native_window else first
    sinks = range(context.sinks) if context.kind == "roll" and not native_window else range(0)
    return sorted({*sinks, *range(max(0, first), place + 1)} & set(range(place + 1)))


@dataclass
class Run:
    """Drives a scheduler and checks every step, those in a row one by one."""

    scheduler: Scheduler
    most_repeats: int = 1
    """How often a step may be run in a row."""
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)
    scored: dict[int, list[int]] = field(default_factory=dict)
    """Prompt tokens whose log-probabilities were reported."""
    cached: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    """As they were planned; each may have been run several times."""
    longest_run: int = 0
    """How often a step has been run in a row, at the most."""
    computed: int = 0
    accepted: int = 0
    """Tokens of drafts that came true."""
    _slots: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def of(
        blocks: int,
        block_size: int,
        max_running: int,
        budget: int,
        native_window: int = 0,
        draft_tokens: int = 0,
        most_repeats: int = 1,
    ) -> Run:
        pool = BlockPool(blocks, block_size)
        return Run(Scheduler(pool, max_running, budget, native_window, draft_tokens=draft_tokens), most_repeats)

    def book(self, progress: list[Progress]) -> None:
        for one in progress:
            self.cached[one.key] = one.cached_tokens
            if one.prompt_logprobs:
                assert one.key not in self.scored, "prompt log-probabilities are reported once"
                self.scored[one.key] = [entry.token_id for entry in one.prompt_logprobs]
            if one.tokens:
                self.outputs.setdefault(one.key, []).extend(one.tokens)
            if one.finished is not None:
                self.ends.setdefault(one.key, []).append(one.finished.kind)

    def step(self, now: float = 0.0, most: int = 1_000) -> Step:
        """Plan a step, run it, in a row as often as it may be and `most` times at the most, and book it."""
        scheduler = self.scheduler
        before = set(scheduler.running)
        step = scheduler.schedule(now, self.most_repeats)
        self.steps += 1
        self._check_plan(step, [sequence for sequence in scheduler.running if sequence not in before])
        self._copy(step)
        if step.repeats > 1:
            sampled = self._run_in_a_row(step, min(most, step.repeats))
        else:
            self._compute(step.chunks)
            sampled = [_sample(chunk) for chunk in step.chunks if chunk.samples]
            self.accepted += sum(len(tokens) - 1 for tokens in sampled)
        scores = {
            c.sequence.request.key: [
                TokenLogprob(token, 0.0, 0)
                for token in c.sequence.tokens[c.first_target : c.first_target + len(c.scored)]
            ]
            for c in step.chunks
        }
        self.book(step.expired + scheduler.complete(step, sampled, scores))
        scheduler.check_integrity()
        for sequence in scheduler.running:
            assert len(sequence.blocks) == scheduler.pool.blocks_for(sequence.computed), "a block for nothing"
        return step

    def drain(self, limit: int = 20_000) -> Run:
        while not self.scheduler.idle:
            self.step()
            assert self.steps < limit, "something waits for ever"
        assert self.scheduler.pool.used == 0
        return self

    def _check_plan(self, step: Step, admitted: list[SequenceState]) -> None:
        scheduler = self.scheduler
        assert step.tokens <= scheduler.max_step_tokens
        assert len(scheduler.running) <= scheduler.max_running
        ranks = [sequence.rank for sequence in scheduler.running]
        assert ranks == sorted(ranks)
        ranks = [sequence.rank for sequence in reversed(scheduler.waiting)]
        assert ranks == sorted(ranks)
        planned = {chunk.sequence for chunk in step.chunks}
        assert step.repeats <= self.most_repeats
        assert step.repeats == 1 or planned == set(scheduler.running), "somebody is left out of a whole run"
        assert planned <= set(scheduler.running)
        assert len(planned) == len(step.chunks)
        if scheduler.running:
            assert scheduler.running[0] in planned, "the best-ranked sequence always moves"
        else:
            assert scheduler.idle or step.expired
        for sequence in admitted:
            passed_over = [other for other in scheduler.waiting if other.rank < sequence.rank]
            assert all(scheduler._groups.awaits(other) for other in passed_over)

    def _run_in_a_row(self, step: Step, most: int) -> list[list[Sampled]]:
        """Run a step again and again, until a sequence ends. To look at, a run so far is a draft that came true."""
        chunks = step.chunks
        assert all(self._may_repeat(chunk) for chunk in chunks)
        for ahead in range(most):
            self._compute(chunks, ahead)
            self.longest_run = max(self.longest_run, ahead + 1)
            sampled = [_sample(chunk) for chunk in chunks]
            tokens = [tuple(one.token for one in own if one.token is not None) for own in sampled]
            if any(len(own) == ahead or own[-1] in (EOS, STOP) for own in tokens):
                break
            chunks = [replace(chunk, draft=own) for chunk, own in zip(chunks, tokens, strict=True)]
        return sampled

    def _may_repeat(self, chunk: Chunk) -> bool:
        """Whether nobody waits for the chunk's token alone."""
        sequence = chunk.sequence
        decodes = chunk.samples and chunk.count == 1 and not chunk.draft and not chunk.scored
        return decodes and sequence.output_count > 0 and not sequence.request.at_once

    def _copy(self, step: Step) -> None:
        for source, target in step.copies:
            for place in range(self.scheduler.pool.block_size):
                self._slots[target, place] = self._slots.get((source, place), 0)

    def _compute(self, chunks: list[Chunk], first: int = 0) -> None:
        """The chunks' rows, from the `first` of each on: those before it have been computed."""
        pool = self.scheduler.pool
        rows = [(chunk, chunk.start + row) for chunk in chunks for row in range(first, chunk.rows)]
        native_window = self.scheduler.tables.native_window
        expected = {chunk.sequence: contents(chunk, native_window) for chunk in chunks}
        written = set()
        for chunk, place in rows:
            slot = self._slot(chunk, place)
            assert pool.references(slot[0]) == 1, "a block that others hold is written to"
            assert not pool.is_published(slot[0]), "a block that others may find is written to"
            assert slot not in written
            written.add(slot)
            self._slots[slot] = expected[chunk.sequence][place]
        for chunk, place in rows:
            for seen in visible(chunk.sequence, place, native_window):
                assert self._slots[self._slot(chunk, seen)] == expected[chunk.sequence][seen], "wrong content"
        for chunk in chunks:
            assert chunk.start == chunk.sequence.computed
            assert chunk.start + chunk.count <= chunk.sequence.view_length
            if chunk.draft:
                self._check_draft(chunk)
        self.computed += len(rows)

    def _check_draft(self, chunk: Chunk) -> None:
        sequence, request = chunk.sequence, chunk.sequence.request
        assert chunk.samples
        assert chunk.start + chunk.count == sequence.view_length
        assert sequence.output_count + len(chunk.draft) < request.max_new_tokens
        assert len(sequence.tokens) + len(chunk.draft) < sequence.max_length
        assert request.context.offset(len(sequence.tokens) + len(chunk.draft) - 1) == sequence.offset

    def _slot(self, chunk: Chunk, place: int) -> tuple[int, int]:
        block = chunk.sequence.blocks[place // self.scheduler.pool.block_size]
        assert block >= 0, "a row looks at a block that has gone"
        return block, place % self.scheduler.pool.block_size


def run_all(requests: list[Submit], *, blocks: int, block_size: int, max_running: int, budget: int) -> Run:
    """All at once, to the end."""
    run = Run.of(blocks, block_size, max_running, budget)
    for request in requests:
        run.scheduler.submit(request)
    return run.drain()


def _sample(chunk: Chunk) -> list[Sampled]:
    """A token behind the chunk, and behind each token of its draft that is right."""
    request, count = chunk.sequence.request, chunk.sequence.output_count
    tokens: list[int | None] = []
    while not tokens or chunk.draft[len(tokens) - 1 : len(tokens)] == (tokens[-1],):
        place = count + len(tokens)
        tokens.append(None if broken_at(request, place) else next_token(request.key, place))
    return [Sampled(token) for token in tokens]
