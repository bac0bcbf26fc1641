"""A scheduler without a model: steps are "run" on blocks that remember what was written to them.

Each slot of each block holds a number that stands for the token there and everything its keys and values depend on.
Before a row may look at a slot, what is there is held against what the row's own sequence says it should be. So a block
that was reused wrongly, copied wrongly, or written to while others relied on it is seen at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pellucid_server.engine.messages import Progress, Sampling, Submit, TokenLogprob
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import Chunk, Sampled, SequenceState, Step
from pellucid_server.kv.blocks import BlockPool

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
EOS, STOP, NAN = 7, 8, 9


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


def expected_output(request: Submit, capacity: int) -> list[int]:
    """What the sequence must give, whatever its company; `capacity`: tokens that prompt and output may come to."""
    output: list[int] = []
    while len(output) < request.max_new_tokens:
        token = next_token(request.key, len(output))
        if NAN in request.prompt:
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
    """Drives a scheduler and checks every step."""

    scheduler: Scheduler
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)
    scored: dict[int, list[int]] = field(default_factory=dict)
    """Prompt tokens whose log-probabilities were reported."""
    cached: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    computed: int = 0
    accepted: int = 0
    """Tokens of drafts that came true."""
    _slots: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def of(
        blocks: int, block_size: int, max_running: int, budget: int, native_window: int = 0, draft_tokens: int = 0
    ) -> Run:
        pool = BlockPool(blocks, block_size)
        return Run(Scheduler(pool, max_running, budget, native_window, draft_tokens=draft_tokens))

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

    def step(self, now: float = 0.0) -> Step:
        scheduler = self.scheduler
        before = set(scheduler.running)
        step = scheduler.schedule(now)
        self.steps += 1
        self._check_plan(step, [sequence for sequence in scheduler.running if sequence not in before])
        self._compute(step)
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
        assert planned <= set(scheduler.running)
        assert len(planned) == len(step.chunks)
        if scheduler.running:
            assert scheduler.running[0] in planned, "the best-ranked sequence always moves"
        else:
            assert scheduler.idle or step.expired
        for sequence in admitted:
            passed_over = [other for other in scheduler.waiting if other.rank < sequence.rank]
            assert all(scheduler._groups.awaits(other) for other in passed_over)

    def _compute(self, step: Step) -> None:
        pool = self.scheduler.pool
        for source, target in step.copies:
            for place in range(pool.block_size):
                self._slots[target, place] = self._slots.get((source, place), 0)
        rows = [(chunk, chunk.start + row) for chunk in step.chunks for row in range(chunk.rows)]
        native_window = self.scheduler.tables.native_window
        expected = {chunk.sequence: contents(chunk, native_window) for chunk in step.chunks}
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
        for chunk in step.chunks:
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
    if NAN in request.prompt:
        return [Sampled(None)]
    tokens = [next_token(request.key, count)]
    while chunk.draft[len(tokens) - 1 : len(tokens)] == (tokens[-1],):
        tokens.append(next_token(request.key, count + len(tokens)))
    return [Sampled(token) for token in tokens]
