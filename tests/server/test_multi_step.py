"""Several steps in a row are as many single steps: the same tokens, ends, logits and cache, to the last bit."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pellucid_model.kernels import rotary_tables
from pellucid_server.engine.connection import EngineConnection
from pellucid_server.engine.execution import Executor
from pellucid_server.engine.messages import Constraint, LogprobWish, Sampling, Submit, TokenLogprob
from pellucid_server.engine.multi_step import Interruption
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import Sampled
from pellucid_server.kv.blocks import BlockPool
from pellucid_server.kv.window import FULL, ContextWindow
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint, tiny_config
from pellucid_testing.plans import needs_kernels
from pellucid_testing.scheduling import Run, submit
from pellucid_testing.stepping import GREEDY, Stepper, poison, submission

CONTEXT = 64
VOCABULARY = tiny_config().vocab_size
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rotary": ({"norm": "rmsnorm", "activation": "swiglu"}, {"kv_block_size": 8}),
    "learned": ({"position": "learned"}, {"kv_block_size": 16}),
    "native windows": ({"position": "alibi", "windows": (5, 9)}, {"kv_block_size": 8}),
    "int8": ({"windows": (7, None)}, {"kv_block_size": 16, "dtype": "bfloat16", "kv_dtype": "int8"}),
}
"""By name: the model, and how it is served."""
WINDOWS = [FULL, FULL, FULL, ContextWindow("reencode", 2, 14, 5), ContextWindow("reencode", 0, 16, 1)]
ROLLING = [ContextWindow("roll", 3, 21), ContextWindow("roll", 0, 8)]
SAMPLINGS = [
    GREEDY,
    Sampling(0.8, 0, 1.0, 0.0, 1),
    Sampling(1.2, 5, 1.0, 0.0, 2),
    Sampling(1.0, 0, 0.7, 0.0, 3),
    Sampling(0.9, 0, 1.0, 0.1, 4),
    Sampling(1.1, 20, 0.95, 0.02, 2**64 - 1, typical_p=0.6),
]
COMPANY: list[dict[str, Any]] = [
    {"sampling": Sampling(0.9, 0, 1.0, 0.0, 5, repetition_penalty=1.3)},
    {"output_logprobs": LogprobWish(2)},
    {"prompt_logprobs": LogprobWish(start=1)},
    {"constraint": Constraint("regex", "[a-z]{1,9}\\.")},
    {"at_once": True},
    {"min_new_tokens": 4},
]
"""What is more than logits and a place in the output can decide."""

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def steppers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stepper]:
    made = {}
    for name, (shape, serving) in MODELS.items():
        folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), tiny_config(context_length=CONTEXT, **shape))
        made[name] = Stepper.of(folder, kv_cache_memory=2**21, tokenizer_size=4 + len(CHARACTERS), **serving)
        assert made[name].loaded.runner.runs_steps
    return made


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@st.composite
def crowds(draw: st.DrawFn, windows: list[ContextWindow], block: int) -> list[Submit]:
    """Requests of lengths around blocks, windows and the context."""
    requests = []
    for key in range(draw(st.integers(1, 7))):
        context = draw(st.sampled_from(windows))
        edges = st.sampled_from([1, block, 2 * block, context.span, 3 * block])
        length = max(1, draw(edges) + draw(st.integers(-1, 1)))
        new = draw(st.sampled_from([1, 2, 3, 10, 35, 45]))
        values: dict[str, Any] = {"context": context, "sampling": draw(st.sampled_from(SAMPLINGS))}
        if context == FULL:
            values["max_length"] = min(
                length + new, draw(st.sampled_from([CONTEXT, CONTEXT, max(length + 1, 3 * block)]))
            )
        if draw(st.integers(0, 7)) == 0:
            values |= draw(st.sampled_from(COMPANY))
        requests.append(submission(key, prompt_of(length, draw(st.integers(0, 1))), new, sequence_index=key, **values))
    return requests


def ended_by_tokens(data: st.DataObject, requests: list[Submit], tokens: dict[int, list[int]]) -> list[Submit]:
    """The requests, some of which end with a token that they have sampled."""
    return [
        replace(request, **{data.draw(st.sampled_from(["eos_ids", "stop_ids"])): [data.draw(st.sampled_from(own))]})
        if (own := tokens.get(request.key)) and data.draw(st.booleans())
        else request
        for request in requests
    ]


def outcome(stepper: Stepper) -> tuple[dict[int, list[int]], dict[int, str], dict[int, list[TokenLogprob]], Any]:
    """Tokens, ends, log-probabilities, and the bits of the logits behind the last tokens."""
    last = {key: rows[-1].numpy().tobytes() for key, rows in stepper.logits.items()}
    return stepper.tokens, stepper.ends, stepper.logprobs, last


@pytest.mark.parametrize("name", MODELS)
def test_a_crowd_has_the_tokens_of_single_steps(steppers: dict[str, Stepper], name: str) -> None:
    """Sequences join, end by tokens and limits, are pushed out and slide their windows."""
    stepper, block = steppers[name], MODELS[name][1]["kv_block_size"]
    windows = WINDOWS if name == "learned" else WINDOWS + ROLLING
    longest = 0

    @given(data=st.data())
    @settings(max_examples=30, deadline=None)
    def compare(data: st.DataObject) -> None:
        nonlocal longest
        requests = data.draw(crowds(windows, block))
        needed = [
            one.context.blocks_needed(one.max_length, block, stepper.loaded.ready.native_window) for one in requests
        ]
        how: dict[str, Any] = {
            "gap": data.draw(st.sampled_from([0, 0, 2])),
            "max_step_tokens": data.draw(st.sampled_from([9, 64])),
        }
        is_tight = data.draw(st.booleans())
        how["blocks"] = max(needed) + data.draw(st.integers(0, 2)) if is_tight else 0
        stepper.run(*requests, **how)
        requests = ended_by_tokens(data, requests, stepper.tokens)
        expected = outcome(stepper.run(*requests, **how))
        cached = stepper.published()
        for most in (2, 5, 32):
            assert outcome(stepper.run(*requests, **how, most_repeats=most)) == expected
            found = stepper.published()
            assert all(cached[content] == found[content] for content in cached.keys() & found.keys())
            assert is_tight or cached.keys() == found.keys()
            longest = max(longest, *stepper.times)

    compare()
    assert longest > 2


FIXED = [
    submission(
        key,
        prompt_of(1 + 5 * key, key % 2),
        30 - 3 * (key % 4),
        context=(windows := (FULL, *ROLLING, FULL, ContextWindow("reencode", 4, 28, 20)))[key % 5],
        sampling=SAMPLINGS[key % 6],
        sequence_index=key,
        max_length=CONTEXT - 2 if windows[key % 5] == FULL else 1000,
    )
    for key in range(10)
]


@pytest.mark.parametrize("how", [{}, {"gap": 6, "max_step_tokens": 20}, {"blocks": 14}], ids=str)
def test_runs_are_as_long_as_nobody_joins_leaves_or_moves(steppers: dict[str, Stepper], how: dict[str, Any]) -> None:
    stepper = steppers["rotary"]
    expected = outcome(stepper.run(*FIXED, **how))
    preemptions, single = stepper.preemptions, len(stepper.steps)
    assert stepper.times == [1] * single
    assert (preemptions > 0) == ("blocks" in how)
    for most in (2, 5, 32):
        assert outcome(stepper.run(*FIXED, **how, most_repeats=most)) == expected
        assert max(stepper.times) >= min(most, 5)
        assert all(times <= step.repeats <= most for times, step in zip(stepper.times, stepper.steps, strict=True))
        assert len(stepper.times) < 0.9 * single


def test_a_token_that_ends_a_sequence_ends_the_run(steppers: dict[str, Stepper]) -> None:
    """Everybody's next step is one without it, whichever way the token ends it; nobody else's end tokens matter."""
    stepper = steppers["rotary"]
    one, other = (submission(key, prompt_of(9, key), 30, sampling=Sampling(1.0, 0, 1.0, 0.0, key)) for key in (1, 2))
    stepper.run(one, other)
    tokens = stepper.tokens
    place = next(i for i in range(8, 25) if tokens[1][i] not in tokens[1][:i])
    foreign = next(token for token in tokens[1][2:place] if token not in tokens[2])
    for ids in ("eos_ids", "stop_ids"):
        ending = replace(one, **{ids: [1000, tokens[1][place], 1001]})
        stepper.run(ending, replace(other, eos_ids=[foreign]), most_repeats=32)
        assert stepper.tokens == {1: tokens[1][: place + 1], 2: tokens[2]}
        assert stepper.ends == {1: ids.removesuffix("_ids").replace("stop", "stop_token"), 2: "max_new_tokens"}
        assert stepper.times == [1, place, 29 - place]


def test_logits_that_are_not_finite_end_their_sequence_in_their_step(tmp_path: Path) -> None:
    stepper = Stepper.of(tiny_checkpoint(tmp_path))
    crowd = [submission(key, prompt_of(7, key), 25, sampling=Sampling(1.0, 0, 1.0, 0.0, key)) for key in range(3)]
    tokens = stepper.run(*crowd).tokens
    others = {*tokens[0], *tokens[2], *(token for one in crowd for token in one.prompt)}
    place = next(i for i in range(5, 20) if tokens[1][i] not in {*others, *tokens[1][:i]})
    poison(stepper, tokens[1][place])
    expected = outcome(stepper.run(*crowd))
    assert expected[0] == tokens | {1: tokens[1][: place + 1]}
    assert expected[1] == {0: "max_new_tokens", 1: "non_finite", 2: "max_new_tokens"}
    clean = stepper.published()
    for most in (2, 5, 32):
        assert outcome(stepper.run(*crowd, most_repeats=most)) == expected
        assert stepper.published() == clean
    assert max(stepper.times) >= 5


def test_what_interrupts_a_run_changes_no_token(steppers: dict[str, Stepper]) -> None:
    stepper = steppers["rotary"]
    expected = outcome(stepper.run(*FIXED))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        quiet = Interruption(math.inf, EngineConnection(ours))
        assert outcome(stepper.run(*FIXED, most_repeats=32, interruption=quiet)) == expected
        assert stepper.times == [step.repeats for step in stepper.steps]
        assert max(stepper.times) >= 5
        theirs.send(b"x")
        for interruption in (quiet, Interruption(0.0)):
            assert outcome(stepper.run(*FIXED, most_repeats=32, interruption=interruption)) == expected
            assert set(stepper.times) == {1}
            assert max(step.repeats for step in stepper.steps) >= 5


@pytest.mark.parametrize("company", COMPANY, ids=lambda company: next(iter(company)))
def test_who_needs_more_than_logits_runs_single_steps_and_so_does_the_company(
    steppers: dict[str, Stepper], company: dict[str, Any]
) -> None:
    stepper = steppers["rotary"]
    plain = submission(1, prompt_of(5), 40)
    special = submission(2, prompt_of(6), 10, **({"eos_ids": [0]} | company))
    expected = outcome(stepper.run(plain, special))
    assert outcome(stepper.run(plain, special, most_repeats=32)) == expected
    beside = [times for times, step in zip(stepper.times, stepper.steps, strict=True) if len(step.chunks) == 2]
    assert max(stepper.times) >= 20, "the other one goes on in runs"
    if company.keys() & {"min_new_tokens", "prompt_logprobs"}:  # they are like all others once that is over
        assert beside[:4] == [1, 1, 1, 1] if "min_new_tokens" in company else True
        assert max(beside) > 1
    else:
        assert set(beside) == {1}


def test_biases_and_allowed_ids_change_nothing_from_token_to_token(steppers: dict[str, Stepper]) -> None:
    stepper = steppers["rotary"]
    samplings = [
        Sampling(0.9, 0, 1.0, 0.0, 5, logit_bias=((9, 3.0), (11, -2.0))),
        Sampling(1.1, 0, 0.9, 0.0, 6, allowed_ids=(7, 8, 9, 12)),
    ]
    requests = [submission(key, prompt_of(5), 40, sampling=each) for key, each in enumerate(samplings)]
    expected = outcome(stepper.run(*requests))
    assert outcome(stepper.run(*requests, most_repeats=32)) == expected
    assert max(stepper.times) >= 20
    assert set(stepper.tokens[1]) <= {7, 8, 9, 12}


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("windows", [(None, None), (5, None)])
def test_many_sequences_of_all_lengths(tmp_path: Path, windows: tuple[int | None, ...], kv_dtype: str) -> None:
    """So many that layers read ahead in the cache for the attention that follows."""
    folder = tiny_checkpoint(tmp_path, tiny_config(context_length=CONTEXT, windows=windows))
    dtype = "bfloat16" if kv_dtype == "int8" else kv_dtype
    stepper = Stepper.of(folder, max_running=20, max_step_tokens=1000, kv_block_size=16, dtype=dtype, kv_dtype=kv_dtype)
    contexts = [FULL, ContextWindow("roll", 3, 21)]
    requests = [submission(key, prompt_of(1 + 2 * key, key), 24, context=contexts[key % 2]) for key in range(20)]
    expected = outcome(stepper.run(*requests))
    assert outcome(stepper.run(*requests, most_repeats=8)) == expected
    assert max(times for times, n in zip(stepper.times, stepper.batch_sizes, strict=True) if n == 20) == 8
    alone = stepper.run(replace(requests[13]), most_repeats=8).tokens[13]
    assert alone == expected[0][13]


def test_an_executor_runs_a_step_in_a_row_where_it_is_told_what_ends_that(steppers: dict[str, Stepper]) -> None:
    stepper = steppers["rotary"]
    expected = stepper.run(submission(1, prompt_of(5), 40)).tokens[1]
    executor = Executor(stepper.loaded.runner, stepper.chooser)
    scheduler = Scheduler(BlockPool(20, 8), 2, 8)
    scheduler.submit(submission(1, prompt_of(5), 40))
    tokens: list[int] = []
    counts = []
    while not scheduler.idle:
        step = scheduler.schedule(0.0, 32)
        found = executor.execute(step, Interruption(math.inf) if len(tokens) >= 3 else None)
        for progress in scheduler.complete(step, found.sampled, found.scores):
            tokens += progress.tokens
        counts.append(len(found.ended))
        assert [len(own) for own in found.sampled] == [len(found.ended)]
        assert found.ended == sorted(found.ended)
    assert tokens == expected
    assert counts == [1, 1, 1, 32, 5]


def test_a_run_may_begin_with_a_copy(steppers: dict[str, Stepper]) -> None:
    """All of a sequence that was pushed out is found again, so that it goes on in a block that others may find."""
    stepper = steppers["rotary"]
    first, again = (submission(key, prompt_of(9), 30, sampling=Sampling(1.0, 0, 1.0, 0.0, 5)) for key in (1, 2))
    urgent = submission(3, prompt_of(4, 1), 1, priority=1)
    expected = stepper.run(first).tokens[1]
    executor, scheduler = Executor(stepper.loaded.runner, stepper.chooser), Scheduler(BlockPool(20, 8), 1, 8)
    scheduler.submit(first)
    tokens: list[int] = []
    copied = 0
    while not scheduler.idle:
        if scheduler.running and scheduler.running[0].request is again and len(scheduler.running[0].tokens) == 16:
            scheduler.submit(urgent)
        step = scheduler.schedule(0.0, 1 if len(tokens) < 7 else 32)
        found = executor.execute(step, Interruption(math.inf))
        copied += bool(step.copies) and len(found.ended) > 1
        for progress in scheduler.complete(step, found.sampled, found.scores):
            tokens += progress.tokens if progress.key == 2 else []
            if progress.key == 1 and progress.finished is not None:
                scheduler.submit(again)
    assert copied == 1
    assert tokens == expected


def test_a_run_reaches_beyond_the_angles_that_are_known(tmp_path: Path) -> None:
    stepper = Stepper.of(tiny_checkpoint(tmp_path, tiny_config(layers=1)))
    long = submission(1, prompt_of(5), rotary_tables.CHUNK + 20, context=ContextWindow("roll", 0, 9), max_length=10**6)
    tokens = stepper.run(long, most_repeats=32).tokens[1]
    assert 32 in stepper.times
    assert tokens == stepper.run(long).tokens[1]


# ---- How many steps ----


def planned(run: Run, most: int = 32) -> int:
    """How often the next step may be run."""
    return run.scheduler.schedule(0.0, most).repeats


def decoding(*requests: Submit, blocks: int = 100, draft_tokens: int = 0) -> Run:
    """A scheduler with blocks of 4 whose sequences all have their first token."""
    run = Run.of(blocks, 4, 4, 64, draft_tokens=draft_tokens)
    for request in requests:
        run.scheduler.submit(request)
    run.step()
    assert all(sequence.output_count == 1 for sequence in run.scheduler.running)
    return run


@pytest.mark.parametrize(
    ("request_", "steps"),
    [
        (submit(0, 5, 90), 32),
        (submit(0, 5, 33), 32),
        (submit(0, 5, 32), 31),
        (submit(0, 5, 2), 1),
        (submit(0, 5, 90, max_length=9), 3),
        (submit(0, 5, 90, max_length=7), 1),
        (submit(0, 3, 90, context=ContextWindow("reencode", 1, 7, 3)), 5),
        (submit(0, 7, 90, context=ContextWindow("reencode", 1, 7, 3)), 1),
        (submit(0, 8, 90, context=ContextWindow("reencode", 1, 7, 3)), 1),
        (submit(0, 3, 90, context=ContextWindow("roll", 1, 7)), 32),
        (submit(0, 5, 90, at_once=True), 1),
    ],
)
def test_the_limits_of_a_run(request_: Submit, steps: int) -> None:
    assert planned(decoding(request_)) == steps
    assert planned(decoding(request_), 2) == min(steps, 2)
    # The least of all.
    assert planned(decoding(submit(2, 5, 20), request_, submit(4, 6, 90))) == min(19, steps)


def test_what_is_no_decode_runs_once() -> None:
    long = submit(4, 100, 90)
    fresh = Run.of(100, 4, 4, 64)
    fresh.scheduler.submit(submit(2, 1, 90))
    assert planned(fresh) == 1, "a first token"
    beside = decoding(submit(2, 5, 90))
    beside.scheduler.submit(long)
    assert [planned(beside), beside.scheduler.running[-1].pending] == [1, 100]
    assert planned(decoding(submit(2, 5, 90), draft_tokens=3)) == 1, "what follows a draft is not known"
    carried = Run.of(100, 4, 4, 64)
    wish = LogprobWish()
    carried.scheduler.submit(submit(2, 5, 90, generated=[1000, 1001], prompt_logprobs=wish, cache_read=False))
    assert planned(carried) == 1, "a prompt that is scored"
    idle = Run.of(100, 4, 4, 64)
    assert idle.scheduler.schedule(0.0, 32).chunks == []


def test_a_run_takes_no_more_blocks_than_there_are_and_gives_back_what_it_does_not_use() -> None:
    """In blocks of 4: each sequence has 2 of them, for 5 tokens and the first of its output, and 2 are left."""
    one, other = submit(2, 5, 90), submit(4, 5, 90)
    run = decoding(one, other, blocks=6)
    step = run.scheduler.schedule(0.0, 32)
    assert step.repeats == 2 * 6 - 5
    pool, running = run.scheduler.pool, run.scheduler.running
    assert pool.available == 0
    run.scheduler.complete(step, [[Sampled(1000), Sampled(1001)]] * 2)
    assert [sequence.computed for sequence in running] == [7, 7]
    assert [len(sequence.blocks) for sequence in running] == [2, 2]
    assert pool.available == 2
    assert planned(decoding(one, blocks=3)) == 3 * 4 - 6
    # With one block left there is none for both.
    tight = decoding(submit(2, 7, 90), submit(4, 7, 90), blocks=5)
    step = tight.scheduler.schedule(0.0, 32)
    assert step.repeats == 1
    tight.scheduler.complete(step, [[Sampled(1000)]] * 2)
    assert [len(sequence.blocks) for sequence in tight.scheduler.running] == [2, 2]


def test_a_sequence_that_has_its_length_already_runs_once() -> None:
    """Carried over from an engine with more memory."""
    run = Run.of(100, 4, 4, 64)
    run.scheduler.submit(submit(2, 5, 90, generated=[1000, 1001], max_length=7))
    step = run.scheduler.schedule(0.0, 32)
    run.scheduler.complete(step, [[Sampled(1002)]])
    assert (step.repeats, run.scheduler.idle) == (1, True)
    found = Run.of(100, 4, 4, 64)
    found.scheduler.submit(submit(2, 9, 90))
    found.step()
    found.scheduler.submit(submit(4, [102] * 7, 90, generated=[102, 1001], max_length=9))
    found.scheduler.abort(2)
    step = found.scheduler.schedule(0.0, 32)
    assert (step.chunks[0].count, step.decodes, step.repeats) == (1, 1, 1)


@pytest.mark.parametrize(
    ("free", "repeats", "taken"),
    [(0, 16, 4), (1, 16, 3), (3, 16, 1), (4, 19, 0), (5, 23, 0), (7, 31, 0), (8, 32, 0)],
)
def test_blocks_that_are_cached_are_given_away_for_the_next_steps_only(free: int, repeats: int, taken: int) -> None:
    run = Run.of(11 + free, 4, 4, 64)
    run.scheduler.submit(submit(2, 36, 1))
    run.step()
    assert run.scheduler.pool.cached == 9
    run.scheduler.submit(submit(4, 5, 90))
    run.step()
    step = run.scheduler.schedule(0.0, 32)
    assert step.repeats == repeats
    assert run.scheduler.pool.cached == 9 - taken


def test_a_step_is_run_once_where_the_next_one_has_no_block() -> None:
    run = Run.of(3, 4, 4, 64)
    run.scheduler.submit(submit(4, 7, 90))
    run.scheduler.submit(submit(6, 3, 90))
    run.step()
    step = run.scheduler.schedule(0.0, 32)
    assert (len(step.chunks), step.repeats) == (2, 1)


def test_who_has_expired_is_told_after_one_step() -> None:
    run = decoding(submit(2, 5, 90), submit(4, 5, 90, time_limit_at=1.0))
    assert run.scheduler.schedule(0.5, 4).repeats == 4
    step = run.scheduler.schedule(2.0, 32)
    assert ([each.key for each in step.expired], step.repeats) == ([4], 1)


def test_nobody_is_pushed_out_for_blocks_that_are_allocated_ahead() -> None:
    for blocks in range(8, 30):
        counts = []
        for most in (1, 2, 5, 32):
            run = Run.of(blocks, 2, 4, 16, most_repeats=most)
            for key in range(0, 12, 2):
                run.scheduler.submit(submit(key, 1 + key % 5, 15))
            run.drain()
            counts.append((run.scheduler.preemptions, run.outputs, run.ends))
            assert most == 1 or run.longest_run > 1
        assert counts == counts[:1] * 4
