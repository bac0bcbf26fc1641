"""What the scheduler lets sequences share: prefixes, prompts of a group, what was computed before a preemption."""

from __future__ import annotations

import pytest

from pellucid_server.engine.messages import LogprobWish
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.kv.blocks import BlockPool
from pellucid_server.kv.window import ContextWindow
from pellucid_testing.scheduling import NAN, Run, run_all, submit


@pytest.mark.parametrize(("prompt", "copies"), [(10, 3), (8, 3), (9, 0), (3, 3)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sequences_of_one_prompt_share_it_and_copy_its_last_block(prompt: int, copies: int, prefix_cache: bool) -> None:
    run = Run(Scheduler(BlockPool(40, 4), 4, 16, prefix_cache=prefix_cache))
    for key in range(1, 5):
        run.scheduler.submit(submit(key, [100 + place for place in range(prompt)], 3, group=1, eos_ids=[], stop_ids=[]))
    steps = [run.step()]
    assert [chunk.count for chunk in steps[0].chunks] == [prompt], "the others wait for the first"
    steps.append(run.step())
    assert sorted(chunk.count for chunk in steps[1].chunks) == [1, 1, 1, 1]
    used = run.scheduler.pool.used
    assert used <= -(-prompt // 4) + 4 + 1
    while not run.scheduler.idle:
        steps.append(run.step())
    assert sum(len(step.copies) for step in steps) == copies
    assert run.computed == prompt + 3 + 4 * 2
    assert all(len(run.outputs[key]) == 3 for key in range(1, 5))


def test_sequences_of_a_group_that_cannot_run_together_run_one_after_another() -> None:
    run = Run.of(6, 4, max_running=4, budget=16)
    for key in range(1, 6):
        run.scheduler.submit(submit(key, [100 + place for place in range(14)], 8, group=1, eos_ids=[], stop_ids=[]))
    run.drain()
    assert all(len(run.outputs[key]) == 8 for key in range(1, 6))


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    """Its old blocks are in the cache when it starts again: the planned count is then too big, and indexes run out of
    range (B45)."""
    prefix = [100 + place for place in range(12)]
    requests = [submit(key, [*prefix, 200 + key], 12, eos_ids=[], stop_ids=[]) for key in range(1, 65)]
    run = run_all(requests, blocks=9, block_size=4, max_running=8, budget=20)
    assert run.scheduler.preemptions >= 64
    assert all(len(run.outputs[request.key]) == 12 for request in requests)
    assert run.computed < 64 * 24, "more was found again than was thrown away"


def test_an_aborted_prompt_leaves_whole_blocks_behind_and_nothing_else() -> None:
    """A request cancelled in mid prefill leaves half-written blocks marked as a good prefix (B50)."""
    prompt = [100 + place for place in range(40)]
    for steps in range(1, 9):
        run = Run.of(30, 4, max_running=2, budget=5)
        run.scheduler.submit(submit(1, prompt, 5))
        for _ in range(steps):
            run.step()
        run.scheduler.abort(1)
        pool = run.scheduler.pool
        assert pool.used == 0
        assert pool.cached == min(5 * steps, 40) // 4
        run.scheduler.submit(submit(2, prompt, 5))
        run.drain()
        assert run.cached[2] == min(39, pool.cached * 4 if steps == 8 else 5 * steps // 4 * 4)


def test_blocks_of_a_sequence_with_non_finite_logits_are_not_found() -> None:
    run = Run.of(30, 4, max_running=2, budget=5)
    prompt = [100, 101, 102, 103, NAN, 104, 105, 106, 107]
    for key in (1, 2):
        run.scheduler.submit(submit(key, prompt, 5))
        run.drain()
    assert run.ends == {1: ["non_finite"], 2: ["non_finite"]}
    assert run.cached == {1: 0, 2: 0}
    assert run.scheduler.pool.cached == 0


def test_who_may_read_and_who_may_write() -> None:
    prompt = [100 + place for place in range(9)]
    run = Run.of(30, 4, max_running=2, budget=16)

    def cached(key: int, **options: object) -> int:
        run.scheduler.submit(submit(key, prompt, 1, **options))
        return run.drain().cached[key]

    assert [cached(1, cache_write=False), cached(2)] == [0, 0]
    assert [cached(3), cached(4, cache_read=False), cached(5, cache_salt="a"), cached(6, cache_salt="a")] == [
        8,
        0,
        0,
        8,
    ]
    tables = run.scheduler.tables
    assert (tables.queried_tokens, tables.hit_tokens) == (5 * 9, 16)
    off = Run(Scheduler(BlockPool(30, 4), 2, 16, prefix_cache=False))
    for key in (1, 2):
        off.scheduler.submit(submit(key, prompt, 1))
        assert off.drain().cached[key] == 0
    assert off.scheduler.pool.cached == 0


def test_prompts_are_scored_once_whatever_is_cached_or_preempted() -> None:
    prompt = [100 + place for place in range(23)]
    run = Run.of(9, 4, max_running=3, budget=7)
    for key, start in enumerate((None, 0, 1, 9, 23), start=1):
        wish = None if start is None else LogprobWish(start=start)
        run.scheduler.submit(submit(key, prompt, 5, prompt_logprobs=wish, context=ContextWindow("roll", 2, 12)))
    run.drain()
    assert run.scheduler.preemptions > 0
    assert run.scored == {2: prompt, 3: prompt[1:], 4: prompt[9:]}


def test_prompts_that_are_the_same_and_cached_as_a_whole_all_find_it_at_once() -> None:
    prompt = [100 + place for place in range(8)]
    run = Run.of(30, 4, max_running=4, budget=16)
    run.scheduler.submit(submit(20, prompt, 1))
    run.drain()
    for key in (21, 22, 24):
        run.scheduler.submit(submit(key, prompt, 2))
    step = run.step()
    assert [chunk.count for chunk in step.chunks] == [1, 1, 1]
    assert len(step.copies) == 3
    assert [run.drain().cached[key] for key in (21, 22, 24)] == [7, 7, 7]


def test_a_conversation_goes_on_with_what_its_moved_window_computed() -> None:
    context = ContextWindow("reencode", 2, 14, 4)
    prompt = [100 + place for place in range(10)]
    run = Run.of(40, 4, max_running=2, budget=16)
    run.scheduler.submit(submit(20, prompt, 17, context=context, eos_ids=[], stop_ids=[]))
    run.drain()
    prompt = prompt + run.outputs[20]
    assert context.offset(len(prompt) - 1) == context.offset(len(prompt) - 2) > 4
    run.scheduler.submit(submit(21, prompt, 1, context=context))
    assert run.drain().cached[21] == (len(prompt) - 1 - context.offset(len(prompt) - 2)) // 4 * 4 > 0


def test_whoever_waited_for_its_group_pushes_out_nobody_of_its_priority() -> None:
    run = Run.of(40, 4, max_running=2, budget=8)
    for key in (20, 21):
        run.scheduler.submit(submit(key, [100 + place for place in range(20)], 3, group=20))
    run.scheduler.submit(submit(22, 3, 9, eos_ids=[], stop_ids=[]))
    run.step()
    assert [sequence.request.key for sequence in run.scheduler.running] == [20, 22], "21 waits for 20's prompt"
    run.drain()
    assert run.scheduler.preemptions == 0
    assert set(run.ends) == {20, 21, 22}


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_sequence_carried_over_with_its_prompt_out_of_sight_counts_no_less_than_nothing(sinks: int) -> None:
    """After an engine's death a re-encoded window that has left the prompt behind made a counter fall, and the server
    with it."""
    scheduler = Scheduler(BlockPool(16, 4), max_running=1, max_step_tokens=32)
    window = ContextWindow("reencode", sinks=sinks, window=8, hop=2)
    scheduler.submit(submit(0, [1, 2, 3, 4, 5], new=60, context=window, generated=list(range(6, 46))), 0.0)
    (chunk,) = scheduler.schedule(0.0).chunks
    assert chunk.sequence.offset > 5
    assert scheduler.tables.queried_tokens == sinks
    assert chunk.sequence.cached_tokens == 0
