"""The scheduler against its invariants, under random loads.

A step is "run" by sampling from the sequence's own numbers, so that its output is known whatever its company.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_server.engine.messages import Progress, Sampling, Submit
from pellucid_server.engine.scheduler import Scheduler, Step
from pellucid_server.kv.blocks import BlockPool

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
EOS, STOP = 7, 8


def submit(key: int, prompt: int, new: int, **extra: object) -> Submit:
    values: dict[str, object] = {"min_new_tokens": 0, "eos_ids": [EOS], "stop_ids": [STOP], "max_length": 10_000}
    values |= extra
    return Submit(key=key, prompt=[100 + key] * prompt, sampling=GREEDY, max_new_tokens=new, **values)  # type: ignore[arg-type]


def next_token(key: int, output_count: int) -> int:
    """The token that a "model" gives to a sequence, a function of the sequence alone; ends some of them early."""
    value = (key * 7919 + output_count * 104729) % 97
    return EOS if value == 3 else STOP if value == 5 else 1000 + value


@dataclass
class Run:
    """Drives a scheduler and checks every step."""

    scheduler: Scheduler
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)
    steps: int = 0

    def book(self, progress: list[Progress]) -> None:
        for one in progress:
            if one.token is not None:
                self.outputs.setdefault(one.key, []).append(one.token)
            if one.finished is not None:
                self.ends.setdefault(one.key, []).append(one.finished.kind)

    def step(self, now: float = 0.0) -> Step:
        scheduler = self.scheduler
        step = scheduler.schedule(now)
        self.steps += 1
        assert step.tokens <= scheduler.max_step_tokens
        assert len(scheduler.running) <= scheduler.max_running
        arrivals = [sequence.arrival for sequence in scheduler.running + scheduler.waiting[::-1]]
        assert arrivals == sorted(arrivals), "whatever runs is older than whatever waits"
        for chunk in step.chunks:
            held = len(chunk.sequence.blocks) * scheduler.pool.block_size
            assert chunk.start == chunk.sequence.computed
            assert chunk.start + chunk.count <= min(held, len(chunk.sequence.tokens))
        if not step.chunks:
            assert scheduler.idle or step.expired
        sampled = [next_token(c.sequence.request.key, c.sequence.output_count) for c in step.chunks if c.samples]
        self.book(step.expired + scheduler.complete(step, sampled))
        scheduler.check_integrity()
        return step

    def drain(self, limit: int = 20_000) -> None:
        while not self.scheduler.idle:
            self.step()
            assert self.steps < limit, "something waits for ever"
        assert self.scheduler.pool.free == self.scheduler.pool.count


def run_all(requests: list[Submit], *, blocks: int, block_size: int, max_running: int, budget: int) -> Run:
    run = Run(Scheduler(BlockPool(blocks, block_size), max_running, budget))
    for request in requests:
        run.scheduler.submit(request)
    run.drain()
    return run


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 24)), min_size=1, max_size=12),
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    spare=st.integers(0, 40),
    max_running=st.integers(1, 8),
    spare_budget=st.integers(0, 30),
)
@settings(max_examples=300, deadline=None)
def test_output_does_not_depend_on_company(
    shapes: list[tuple[int, int]], block_size: int, spare: int, max_running: int, spare_budget: int
) -> None:
    requests = [submit(key, prompt, new) for key, (prompt, new) in enumerate(shapes)]
    longest = max(prompt + new for prompt, new in shapes)
    blocks = -(-longest // block_size) + spare
    crowd = run_all(
        requests, blocks=blocks, block_size=block_size, max_running=max_running, budget=max_running + spare_budget
    )
    for request in requests:
        alone = run_all([request], blocks=blocks, block_size=block_size, max_running=1, budget=1000)
        assert crowd.outputs.get(request.key) == alone.outputs.get(request.key)
        assert crowd.ends[request.key] == alone.ends[request.key]
        assert len(crowd.ends[request.key]) == 1


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_arrivals_aborts_and_deadlines(data: st.DataObject) -> None:
    run = Run(Scheduler(BlockPool(data.draw(st.integers(12, 30)), 4), max_running=4, max_step_tokens=9))
    aborted: set[int] = set()
    key, now = 0, 0.0
    for _ in range(data.draw(st.integers(1, 60))):
        now += 1.0
        event = data.draw(st.sampled_from(["submit", "submit", "abort", "step", "step", "step"]))
        if event == "submit":
            limits = {
                name: data.draw(st.none() | st.floats(now - 1, now + 40)) for name in ("deadline", "time_limit_at")
            }
            run.scheduler.submit(submit(key, data.draw(st.integers(1, 24)), data.draw(st.integers(0, 24)), **limits))
            key += 1
        elif event == "abort" and key:
            victim = data.draw(st.integers(0, key - 1))
            if run.scheduler.abort(victim):
                aborted.add(victim)
            assert not run.scheduler.abort(victim)
            run.scheduler.check_integrity()
        else:
            run.step(now)
    while not run.scheduler.idle:
        now += 1.0
        run.step(now)
    assert set(run.ends) | aborted == set(range(key))
    assert not set(run.ends) & aborted
    assert all(len(ends) == 1 for ends in run.ends.values())


def test_preempted_by_need_and_resumed_with_the_same_output() -> None:
    requests = [submit(key, 10, 10) for key in (20, 21, 22, 24)]
    run = run_all(requests, blocks=8, block_size=4, max_running=4, budget=64)
    assert run.scheduler.preemptions > 0
    for request in requests:
        alone = run_all([request], blocks=8, block_size=4, max_running=1, budget=64)
        assert run.outputs[request.key] == alone.outputs[request.key]


def test_every_decode_moves_while_a_long_prompt_is_prefilled() -> None:
    run = Run(Scheduler(BlockPool(400, 4), max_running=4, max_step_tokens=16))
    run.scheduler.submit(submit(1, 3, 500, eos_ids=[], stop_ids=[]))
    run.step()
    run.scheduler.submit(submit(2, 200, 5))
    run.scheduler.submit(submit(4, 3, 5))
    before = len(run.outputs[1])
    for _ in range(13):
        step = run.step()
        assert sum(chunk.sequence.request.key == 1 for chunk in step.chunks) == 1
        assert step.tokens <= 16
    assert len(run.outputs[1]) == before + 13


def test_a_short_prompt_is_not_held_up_by_long_ones() -> None:
    run = Run(Scheduler(BlockPool(4000, 4), max_running=16, max_step_tokens=64))
    for key in range(1, 11):
        run.scheduler.submit(submit(key, 1000, 1))
    run.step()
    run.scheduler.submit(submit(12, 3, 1))
    for _ in range(4):
        run.step()
    assert 12 in run.ends
    assert set(run.ends) == {12}
    run.drain()


@pytest.mark.parametrize(
    ("prompt", "new", "max_length", "kind", "outputs"),
    [
        (10, 6, 16, "max_new_tokens", 6),
        (10, 7, 16, "context_full", 6),
        (15, 5, 16, "context_full", 1),
        (10, 0, 16, "max_new_tokens", 0),
        (16, 0, 16, "max_new_tokens", 0),
    ],
)
def test_ends_of_the_context(prompt: int, new: int, max_length: int, kind: str, outputs: int) -> None:
    request = submit(33, prompt, new, max_length=max_length, eos_ids=[], stop_ids=[])
    run = run_all([request], blocks=4, block_size=4, max_running=2, budget=5)
    assert run.ends == {33: [kind]}
    assert len(run.outputs.get(33, [])) == outputs


def test_end_tokens_and_non_finite_logits() -> None:
    def end_with(token: int | None) -> Progress:
        scheduler = Scheduler(BlockPool(4, 4), 1, 8)
        scheduler.submit(submit(1, 3, 5))
        (progress,) = scheduler.complete(scheduler.schedule(0.0), [token])
        assert scheduler.idle
        return progress

    for token, kind in ((EOS, "eos"), (STOP, "stop_token")):
        progress = end_with(token)
        assert progress.token == token
        assert progress.finished is not None
        assert (progress.finished.kind, progress.finished.matched_token_id) == (kind, token)
    progress = end_with(None)
    assert progress.token is None
    assert progress.finished is not None
    assert progress.finished.kind == "non_finite"


def test_end_tokens_are_banned_until_the_minimum_is_out() -> None:
    scheduler = Scheduler(BlockPool(8, 4), 1, 8)
    scheduler.submit(submit(1, 3, 5, min_new_tokens=2))
    banned = []
    for _ in range(4):
        step = scheduler.schedule(0.0)
        banned.append(tuple(step.chunks[0].sequence.banned_ids))
        scheduler.complete(step, [1000])
    assert banned == [(EOS, STOP), (EOS, STOP), (), ()]


def test_recovered_sequence_goes_on_after_what_it_had() -> None:
    whole = run_all([submit(1, 5, 8)], blocks=8, block_size=4, max_running=1, budget=8).outputs[1]
    resumed = run_all([submit(1, 5, 8, generated=whole[:3])], blocks=8, block_size=4, max_running=1, budget=8)
    assert resumed.outputs[1] == whole[3:]


def test_deadlines_of_sequences_that_have_ended_are_forgotten() -> None:
    scheduler = Scheduler(BlockPool(8, 4), 1, 8)
    for key in range(1000):
        scheduler.submit(submit(key, 3, 5, deadline=1e9, time_limit_at=5e8))
        scheduler.abort(key)
    assert len(scheduler._expiries) < 100
    scheduler.submit(submit(1001, 3, 5, deadline=7.0))
    assert [one.key for one in scheduler.schedule(8.0).expired] == [1001]


def test_what_can_never_run_is_refused() -> None:
    scheduler = Scheduler(BlockPool(2, 4), 1, 8)
    scheduler.submit(submit(1, 8, 0))
    for prompt in (0, 9):
        with pytest.raises(ValueError, match="can never run"):
            scheduler.submit(submit(2, prompt, 1))
    with pytest.raises(ValueError, match="max_step_tokens"):
        Scheduler(BlockPool(2, 4), max_running=4, max_step_tokens=3)


def test_pool_notices_a_lost_and_a_shared_block() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    pool.check_integrity([held])
    for tables in ([], [held, held]):
        with pytest.raises(RuntimeError, match="blocks exist"):
            pool.check_integrity(tables)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
