"""The scheduler against its invariants, under random loads.

A step is "run" by sampling from the sequence's own numbers, so that its output is known whatever its company.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_server.engine.messages import Progress
from pellucid_server.engine.prompt_shares import ROWS_BESIDE_SHORT
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import AGEING_SECONDS, Sampled
from pellucid_server.kv.blocks import BlockPool
from pellucid_testing.scheduling import EOS, STOP, Run, run_all, submit


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 24)), min_size=1, max_size=12),
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    spare=st.integers(0, 40),
    max_running=st.integers(1, 8),
    spare_budget=st.integers(0, 30),
)
@settings(max_examples=40, deadline=None)
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


def test_preempted_by_need_and_resumed_with_the_same_output() -> None:
    requests = [submit(key, 10, 10) for key in (20, 21, 22, 24)]
    run = run_all(requests, blocks=8, block_size=4, max_running=4, budget=64)
    assert run.scheduler.preemptions > 0
    for request in requests:
        alone = run_all([request], blocks=8, block_size=4, max_running=1, budget=64)
        assert run.outputs[request.key] == alone.outputs[request.key]


def test_long_prompts_hold_back_in_the_step_of_a_short_one() -> None:
    scheduler = Scheduler(BlockPool(100, 16), max_running=4, max_step_tokens=128)

    def step() -> list[tuple[int, int, bool]]:
        step = scheduler.schedule(0.0)
        scheduler.complete(step, [[Sampled(1)] for chunk in step.chunks if chunk.samples])
        return [(chunk.sequence.request.key, chunk.count, chunk.samples) for chunk in step.chunks]

    scheduler.submit(submit(1, 500, 4))
    assert step() == [(1, 128, False)]
    scheduler.submit(submit(2, 16, 1))
    assert step() == [(1, ROWS_BESIDE_SHORT, False), (2, 16, True)]
    assert step() == [(1, 128, False)]
    scheduler.submit(submit(3, 200, 1))  # not short: it has its share, and the first one the rest
    assert step() == [(1, 96, False), (3, 32, False)]


def test_long_prompts_hold_back_in_every_other_step_at_most() -> None:
    scheduler, counts = Scheduler(BlockPool(100, 16), max_running=4, max_step_tokens=128), []
    scheduler.submit(submit(1, 600, 1))
    for key in range(2, 8):
        scheduler.submit(submit(key, 16, 1))
        step = scheduler.schedule(0.0)
        scheduler.complete(step, [[Sampled(1)] for chunk in step.chunks if chunk.samples])
        counts += [chunk.count for chunk in step.chunks if chunk.sequence.request.key == 1]
    assert counts == [96, ROWS_BESIDE_SHORT] * 3


def test_every_decode_moves_while_a_long_prompt_is_prefilled() -> None:
    run = Run.of(400, 4, max_running=4, budget=16)
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
    run = Run.of(4000, 4, max_running=16, budget=64)
    for key in range(1, 11):
        run.scheduler.submit(submit(key, 400, 1))
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
        (progress,) = scheduler.complete(scheduler.schedule(0.0), [[Sampled(token)]])
        assert scheduler.idle
        return progress

    for token, kind in ((EOS, "eos"), (STOP, "stop_token")):
        progress = end_with(token)
        assert progress.tokens == [token]
        assert progress.finished is not None
        assert (progress.finished.kind, progress.finished.matched_token_id) == (kind, token)
    progress = end_with(None)
    assert progress.tokens == []
    assert progress.finished is not None
    assert progress.finished.kind == "non_finite"


def test_end_tokens_are_banned_until_the_minimum_is_out() -> None:
    scheduler = Scheduler(BlockPool(8, 4), 1, 8)
    scheduler.submit(submit(1, 3, 5, min_new_tokens=2))
    banned = []
    for _ in range(4):
        step = scheduler.schedule(0.0)
        banned.append(tuple(step.chunks[0].sequence.banned_ids()))
        scheduler.complete(step, [[Sampled(1000)]])
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


def order_of_starts(*arrivals: tuple[float, int]) -> list[int]:
    """Keys of sequences that arrive at a time with a priority while one runs, in the order in which they start."""
    run = Run.of(100, 4, max_running=1, budget=8)
    run.scheduler.submit(submit(0, 3, 6, priority=100, eos_ids=[], stop_ids=[]), 0.0)
    run.step()
    for key, (at, priority) in enumerate(arrivals, start=1):
        run.scheduler.submit(submit(key, 3, 2, priority=priority), at)
    started: list[int] = []
    while not run.scheduler.idle:
        started += [c.sequence.request.key for c in run.step().chunks if c.sequence.request.key not in started]
    return started[1:]


def test_priority_goes_first_and_waiting_makes_up_for_it() -> None:
    assert order_of_starts((1, 0), (2, 1), (3, 0), (4, 5), (5, -1)) == [4, 2, 1, 3, 5]
    ahead, level = AGEING_SECONDS, 1
    assert order_of_starts((1, 0), (1 + ahead - 0.5, level)) == [2, 1]
    assert order_of_starts((1, 0), (1 + ahead + 0.5, level)) == [1, 2], "nobody is overtaken for longer"
    assert order_of_starts((1, 0), (1 + 3 * ahead + 0.5, 3)) == [1, 2]


def test_a_stream_of_urgent_requests_starves_nobody() -> None:
    run = Run.of(8, 4, max_running=2, budget=8)
    run.scheduler.submit(submit(0, 9, 12, priority=-1, eos_ids=[], stop_ids=[]), 0.0)
    now, key = 0.0, 1
    while 0 not in run.ends:
        run.scheduler.submit(submit(key, 9, 6, priority=2, eos_ids=[], stop_ids=[]), now)
        key, now = key + 1, now + 1.0
        for _ in range(3):  # fewer steps than the requests need: the queue of urgent ones grows all the time
            run.step(now)
        assert now < 1000, "starved"
    assert len(run.scheduler.waiting) > 5
    run.drain()


def test_the_lowest_priority_and_the_youngest_of_it_makes_room() -> None:
    run = Run.of(9, 4, max_running=4, budget=16)
    for key, priority in enumerate((0, 1, 0, 1), start=20):
        run.scheduler.submit(submit(key, 6, 8, priority=priority, eos_ids=[], stop_ids=[]))
    first = None
    while first is None:
        run.step()
        first = next((one.request.key for one in run.scheduler.waiting if one.preemptions), None)
    assert first == 22
    run.drain()
    assert run.scheduler.preemptions > 0


@pytest.mark.parametrize(("priority", "starts"), [(0, False), (1, True)])
def test_only_higher_priority_takes_the_place_of_what_runs(priority: int, starts: bool) -> None:
    for blocks, max_running in ((100, 2), (8, 3)):  # no place left; no blocks left
        run = Run.of(blocks, 4, max_running=max_running, budget=16)
        for key in (1, 2):
            run.scheduler.submit(submit(key, 12, 4, eos_ids=[], stop_ids=[]))
        for _ in range(3):
            run.step()
        run.scheduler.submit(submit(3, 12, 4, priority=priority, eos_ids=[], stop_ids=[]), 1.0)
        assert (3 in [chunk.sequence.request.key for chunk in run.step(1.0).chunks]) == starts
        assert run.scheduler.preemptions == (1 if starts else 0)
        assert (
            run.drain().outputs[2]
            == run_all(
                [submit(2, 12, 4, eos_ids=[], stop_ids=[])], blocks=8, block_size=4, max_running=1, budget=16
            ).outputs[2]
        )
