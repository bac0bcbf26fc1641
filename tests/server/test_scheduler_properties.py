"""The scheduler under everything: shared prefixes, groups, windows, salts, priorities, cancels, deadlines, drafts.

Every row of every step is checked for looking at what its own tokens say it should (see pellucid_testing.scheduling),
and every output against what it must be whatever its company.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_server.engine.messages import LogprobWish, Submit
from pellucid_server.kv.window import FULL, ContextWindow
from pellucid_testing.scheduling import EOS, LATE, LATE_NAN, NAN, STOP, Run, expected_output, submit

WINDOWS = [FULL, FULL, ContextWindow("roll", 2, 5), ContextWindow("roll", 5, 8), ContextWindow("roll", 0, 3)]
WINDOWS += [ContextWindow("reencode", 1, 7, 3), ContextWindow("reencode", 5, 6, 6), ContextWindow("reencode", 0, 4, 1)]


@st.composite
def requests(draw: st.DrawFn, key: int) -> list[Submit]:
    """One request, of one to four sequences; prompts begin alike often, and some are the same."""
    stem, length = draw(st.integers(1, 3)), draw(st.integers(0, 30))
    prompt = [stem * 100 + place % 7 for place in range(length)] + draw(st.lists(st.integers(50, 52), max_size=3))
    prompt = prompt or [60]
    if draw(st.integers(0, 19)) == 0:
        prompt[draw(st.integers(0, len(prompt) - 1))] = draw(st.sampled_from([NAN, LATE_NAN]))
    count = draw(st.sampled_from([1, 1, 1, 2, 4]))
    values: dict[str, Any] = {
        "context": draw(st.sampled_from(WINDOWS)),
        "priority": draw(st.integers(-2, 2)),
        "cache_read": draw(st.integers(0, 3)) > 0,
        "cache_write": draw(st.integers(0, 3)) > 0,
        "cache_salt": draw(st.sampled_from(["", "", "a"])),
        "at_once": draw(st.integers(0, 7)) == 0,
    }
    new = draw(st.integers(0, 20))
    values["max_length"] = draw(st.sampled_from([10_000, 10_000, len(prompt) + 1, len(prompt) + 8]))
    start = draw(st.none() | st.none() | st.integers(0, len(prompt)))
    first = LogprobWish(start=start) if start is not None else None
    return [
        submit(key + index, prompt, new, group=key, prompt_logprobs=None if index else first, **values)
        for index in range(count)
    ]


def check(run: Run, request: Submit) -> None:
    """An ended sequence's outcome."""
    tables, pool = run.scheduler.tables, run.scheduler.pool
    fits = tables.blocks_needed(request, request.max_length) <= pool.count
    most = request.max_length if fits else pool.token_capacity
    output = expected_output(request, most)
    (end,) = run.ends[request.key]
    if end in ("deadline", "time_limit"):
        output = output[: len(run.outputs.get(request.key, []))]
    assert run.outputs.get(request.key, []) == output
    if NAN in request.prompt and request.max_new_tokens:
        assert end in ("non_finite", "deadline", "time_limit")
    elif LATE_NAN in request.prompt and len(output) == LATE and end not in ("deadline", "time_limit"):
        limit = min(request.max_new_tokens, most - len(request.prompt))
        assert (end == "non_finite") == (limit > LATE and output[-1] not in (EOS, STOP))
    elif request.prompt_logprobs is not None and end not in ("deadline", "time_limit"):
        assert run.scored.get(request.key, []) == request.prompt[request.prompt_logprobs.start :]
    if not request.cache_read or (request.prompt_logprobs is not None and request.prompt_logprobs.start < 2):
        assert run.cached.get(request.key, 0) == 0


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_nothing_is_lost_reused_wrongly_or_starved(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4, 8]))
    run = Run.of(
        -(-data.draw(st.integers(35, 120)) // block_size),
        block_size,
        max_running := data.draw(st.integers(1, 6)),
        max_running + data.draw(st.integers(0, 20)),
        data.draw(st.sampled_from([0, 0, 5])),
        data.draw(st.sampled_from([0, 1, 5])),
        data.draw(st.sampled_from([1, 2, 5, 32])),
    )
    submitted: dict[int, Submit] = {}
    aborted: set[int] = set()
    now = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 1.0, 5.0]))
        event = data.draw(st.sampled_from(["submit", "submit", "abort", "step", "step", "step"]))
        if event == "submit":
            for request in data.draw(requests(len(submitted))):
                run.scheduler.submit(request, now)
                submitted[request.key] = request
        elif event == "abort" and submitted:
            key = data.draw(st.integers(0, len(submitted) - 1))
            if run.scheduler.abort(key):
                aborted.add(key)
            assert not run.scheduler.abort(key)
            run.scheduler.check_integrity()
        else:
            run.step(now, data.draw(st.sampled_from([1, 2, 1_000])))
    run.drain()
    assert set(run.ends) == set(submitted) - aborted
    for key in run.ends:
        check(run, submitted[key])


def test_who_is_pushed_out_comes_back_in_a_later_step() -> None:
    """Not in the same one: it would share a block that its sibling is about to write to, and copy it too late."""
    run = Run.of(3, 8, 3, 6)
    for key in (0, 2):
        run.scheduler.submit(submit(key, [60], 6, group=0, cache_read=False))
    run.step()
    run.step()
    run.scheduler.submit(submit(4, list(range(100, 110)), 0, priority=1))
    run.drain()
    assert run.scheduler.preemptions > 0
    assert run.outputs == {key: expected_output(submit(key, [60], 6), 24) for key in (0, 2)}


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_deadlines_in_every_state(data: st.DataObject) -> None:
    most_repeats = data.draw(st.sampled_from([1, 2, 32]))
    run = Run.of(data.draw(st.integers(12, 30)), 4, max_running=4, budget=9, most_repeats=most_repeats)
    submitted: dict[int, Submit] = {}
    now = 0.0
    for key in range(data.draw(st.integers(1, 10))):
        limits = {name: data.draw(st.none() | st.floats(now - 1, now + 40)) for name in ("deadline", "time_limit_at")}
        prompt, new = data.draw(st.integers(1, 24)), data.draw(st.integers(0, 20))
        submitted[key] = submit(key, prompt, new, priority=data.draw(st.integers(-1, 1)), **limits)
        run.scheduler.submit(submitted[key], now)
        for _ in range(data.draw(st.integers(0, 4))):
            now += 1.0
            run.step(now)
    while not run.scheduler.idle:
        now += 1.0
        run.step(now)
    assert set(run.ends) == set(submitted)
    for request in submitted.values():
        check(run, request)


@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
@pytest.mark.parametrize("native_window", [0, 6])
@pytest.mark.parametrize("context", WINDOWS[1:], ids=str)
def test_what_a_second_run_computes(context: ContextWindow, native_window: int, block_size: int) -> None:
    """Prompts of every length, cold and then again: the second time the last block at the most is computed anew."""
    for length in range(1, 30):
        run = Run.of(200, block_size, 2, 64, native_window)
        prompt = [100 + place for place in range(length)]
        run.scheduler.submit(submit(1, prompt, 0, context=context))
        run.drain()
        cold = run.computed
        run.scheduler.submit(submit(2, prompt, 0, context=context))
        run.drain()
        view = length - context.offset(length - 1)
        whole = view // block_size * block_size
        assert run.computed - cold == max(1, view - whole)
        assert run.cached[2] == min(whole, view - 1)
