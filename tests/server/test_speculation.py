"""Drafts: found as a slow search finds them, as long as they are worth it, and never seen in what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_server.engine.messages import Constraint, LogprobWish, Sampling, Submit
from pellucid_server.engine.speculation import CANDIDATES, LONGEST_MATCH, Match, NgramIndex
from pellucid_server.kv.window import FULL, ContextWindow
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint
from pellucid_testing.scheduling import EOS, STOP, Run, expected_output, next_token, submit
from pellucid_testing.stepping import Stepper, submission

TOKENIZER = CharacterTokenizer.train([CHARACTERS])
DRAFT = 6


# ---- Finding a draft ----


def slow_match(tokens: list[int]) -> Match | None:
    """The longest common suffix with one of the latest places where the last two tokens were side by side before."""

    def common(place: int) -> int:
        return max(n for n in range(2, min(place, LONGEST_MATCH) + 1) if tokens[place - n : place] == tokens[-n:])

    places = [end for end in range(len(tokens) - 1, 1, -1) if tokens[end - 2 : end] == tokens[-2:]]
    matches = [Match(common(end), end) for end in places[:CANDIDATES]]
    return max(matches, key=lambda match: (match.length, match.begin), default=None)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.data())
def test_the_index_finds_what_a_search_finds(tokens: list[int], data: st.DataObject) -> None:
    """However its sequence has grown."""
    index = NgramIndex()
    for length in sorted(data.draw(st.lists(st.integers(1, len(tokens)), max_size=5))):
        index.follow(tokens[:length])
        assert index.match(tokens[:length]) == slow_match(tokens[:length])
    index.follow(tokens)
    assert index.match(tokens) == slow_match(tokens)


def test_a_period_goes_on() -> None:
    index, tokens = NgramIndex(), [9, 9, 1, 2, 3, 1, 2, 3, 1, 2]
    index.follow(tokens)
    match = index.match(tokens)
    assert match == Match(5, 7)
    assert match.continuation(tokens, 7) == (3, 1, 2, 3, 1, 2, 3)


# ---- How long it is ----


def drafts(run: Run, request: Submit, outputs: list[int]) -> list[int]:
    """Lengths of a lone sequence's drafts while a "model" gives it these tokens, all drafts of which are refused."""
    from pellucid_server.engine.sequence import Sampled

    run.scheduler.submit(request)
    lengths = []
    for token in outputs:
        step = run.scheduler.schedule(0.0)
        lengths.append(len(step.chunks[0].draft))
        run.scheduler.complete(step, [[Sampled(token)]])
        run.scheduler.check_integrity()
    return lengths


def test_a_sequence_whose_drafts_are_refused_drafts_less() -> None:
    """The same pair again and again, and each time another token behind it."""
    outputs = [token for number in range(60) for token in (5, 6, 1000 + number)]
    lengths = drafts(Run.of(200, 4, 1, 64, draft_tokens=DRAFT), submit(1, [1, 2], 1000), outputs)
    drafting = [length for length in lengths[::3] if length]
    assert lengths[6:9].count(0) < 3
    assert sum(lengths[90:]) < sum(lengths[:90]) / 2
    assert len(drafting) < 60


def test_drafts_are_short_where_a_step_is_large() -> None:
    """One row more is nothing beside the weights that one stream reads, and something beside those of many."""
    longest = []
    for others in (0, 7, 30):
        run = Run.of(4000, 4, 64, 512, draft_tokens=16)
        run.scheduler.submit(submit(1, [1, 2, 3], 500, eos_ids=[], stop_ids=[]))
        for key in range(others):
            run.scheduler.submit(submit(2 * key + 2, [100 + key], 500, eos_ids=[], stop_ids=[]))
        longest.append(max(len(run.step().chunks[0].draft) for _ in range(40)))
    assert longest[0] > longest[1] > longest[2] > 0


# ---- What it costs others ----


def test_drafts_take_no_block_that_others_may_find() -> None:
    """While there are free ones, nothing is evicted; then drafts end with the block. Run.step holds that they give
    back what they took."""
    run = Run.of(8 + 9, 2, 2, 64, draft_tokens=DRAFT)
    for stem in (200, 300):
        run.scheduler.submit(submit(stem, [stem + place for place in range(8)], 0))
        run.drain()
    run.scheduler.submit(submit(1, [1, 2, 3, 1, 2, 3, 1], 20, eos_ids=[], stop_ids=[]))
    pool, before, after = run.scheduler.pool, [], []
    while not run.scheduler.idle:
        free, cached = pool.free, pool.cached
        draft = len(run.step().chunks[0].draft)
        if free:
            assert pool.cached >= cached == 8
            before.append(draft)
        else:
            after.append(draft)
    assert max(before) > 1
    assert max(after) == 1


def test_more_than_one_token_comes_of_a_step() -> None:
    """And nothing is drafted beyond the end of an output, or of a budget."""
    request = submit(5, [1, 2, 3], 40, stop_ids=[])
    plain, fast = Run.of(40, 4, 1, 8), Run.of(40, 4, 1, 8, draft_tokens=DRAFT)
    for run in (plain, fast):
        run.scheduler.submit(request)
        run.drain()
        assert run.outputs[5] == expected_output(request, 160)
    assert EOS not in fast.outputs[5]
    assert plain.steps == 40
    assert fast.steps == 40 - fast.accepted < 30


@pytest.mark.parametrize("end", [EOS, STOP])
def test_a_draft_stops_before_a_token_that_ends_the_output(end: int) -> None:
    """The prompt has what will come, and more behind it."""
    key = next(key for key in range(1, 400, 2) if next_token(key, 3) == end)
    before, output = list(range(50, 60)), [next_token(key, place) for place in range(4)]
    run = Run.of(40, 4, 1, 64, draft_tokens=DRAFT)
    run.scheduler.submit(submit(key, [*before, *output, *before], 40))
    drafted = [run.step().chunks[0].draft for _ in range(2)]
    run.drain()
    assert drafted == [tuple(output[:1]), tuple(output[2:3])]
    assert run.outputs[key] == output


# ---- What comes out ----


@pytest.fixture(scope="module")
def stepper(tmp_path_factory: pytest.TempPathFactory) -> Stepper:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return Stepper.of(folder, tokenizer_size=TOKENIZER.vocab_size)


WINDOWS = [
    FULL,
    FULL,
    ContextWindow("roll", 2, 9),
    ContextWindow("reencode", 1, 20, 7),
    ContextWindow("reencode", 0, 9),
]
CONSTRAINTS = [None, None, None, Constraint("regex", "(ab|cd){2,30}"), Constraint("choices", choices=("ababab", "abc"))]


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    """Few ids to choose from, so that an output repeats itself even where it is drawn."""
    some = st.lists(st.integers(4, TOKENIZER.vocab_size - 1), min_size=1, max_size=3, unique=True)
    return Sampling(
        draw(st.sampled_from([0.0, 0.0, 0.7])),
        draw(st.sampled_from([0, 2])),
        draw(st.sampled_from([1.0, 0.5])),
        0.0,
        seed=draw(st.integers(0, 2**64 - 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.8, 1.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.1])),
        logit_bias=draw(st.sampled_from([(), ((7, 4.0),)])),
        allowed_ids=tuple(draw(st.just([]) | some)),
    )


@st.composite
def submissions(draw: st.DrawFn, key: int) -> list[Submit]:
    """A request of one output or three."""
    text = draw(st.sampled_from(["hello, world", "ab" * 9, "abcabcabd"]))
    prompt, new = TOKENIZER.encode(text), draw(st.integers(1, 40))
    ids = st.lists(st.integers(4, TOKENIZER.vocab_size - 1), max_size=2)
    values: dict[str, Any] = {
        "sampling": draw(samplings()),
        "eos_ids": draw(ids),
        "stop_ids": draw(ids),
        "min_new_tokens": draw(st.sampled_from([0, 0, new // 2])),
        "context": draw(st.sampled_from(WINDOWS)),
        "max_length": draw(st.sampled_from([len(prompt) + new, 40])),
        "output_logprobs": draw(st.sampled_from([None, LogprobWish(2)])),
        "prompt_logprobs": draw(st.sampled_from([None, None, LogprobWish(1)])),
        "constraint": draw(st.sampled_from(CONSTRAINTS)),
        "priority": draw(st.integers(0, 1)),
    }
    count = draw(st.sampled_from([1, 1, 3]))
    return [
        submission(key + index, prompt, new, group=key if count > 1 else None, sequence_index=index, **values)
        for index in range(count)
    ]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_everything_is_as_without(stepper: Stepper, data: st.DataObject) -> None:
    """Tokens, ends, log-probabilities, and the logits behind each token to the last bit."""
    requests = [each for key in range(data.draw(st.integers(1, 3))) for each in data.draw(submissions(10 * key))]
    how: dict[str, Any] = {"blocks": data.draw(st.sampled_from([0, 14])), "gap": data.draw(st.integers(0, 2))}
    stepper.run(*requests, **how)
    plain = stepper.tokens, stepper.ends, stepper.logprobs, stepper.logits
    stepper.run(*requests, **how, draft_tokens=DRAFT)
    assert (stepper.tokens, stepper.ends, stepper.logprobs) == plain[:3]
    for key, rows in plain[3].items():
        assert torch.equal(torch.stack(rows), torch.stack(stepper.logits[key])), key


REPEATING = {"sampling": Sampling(0.9, 0, 1.0, 0.0, 3, repetition_penalty=0.9, frequency_penalty=-0.5)}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": Sampling(0.9, 2, 1.0, 0.0, 3, allowed_ids=(7, 9, 11))},
    "penalties": REPEATING,
    "constraint": {"constraint": Constraint("regex", "(ab|cd){2,60}")},
    "constraint that ends": {"constraint": Constraint("choices", choices=("ab" * 11,))},
    "log-probabilities": {"output_logprobs": LogprobWish(3)},
    "roll": {"context": ContextWindow("roll", 2, 20), "max_length": 10_000},
    "reencode": {"context": ContextWindow("reencode", 1, 30, 15), "max_length": 10_000},
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_request_gets_drafts_that_come_true(stepper: Stepper, case: str) -> None:
    """The property above could hold for want of drafts."""
    request = submission(1, TOKENIZER.encode("abababab"), 60, **CASES[case])
    stepper.run(request)
    plain = stepper.tokens, stepper.ends, stepper.logprobs, len(stepper.steps)
    stepper.run(request, draft_tokens=DRAFT)
    assert (stepper.tokens, stepper.ends, stepper.logprobs) == plain[:3]
    assert len(stepper.steps) + stepper.accepted == plain[3]
    assert stepper.accepted >= 5


def same(stepper: Stepper, *requests: Submit) -> int:
    """Hold runs with and without drafts together; how many drafted tokens came true."""
    accepted = 0
    for request in requests:
        stepper.run(request)
        plain = stepper.tokens, stepper.ends
        stepper.run(request, draft_tokens=DRAFT)
        assert (stepper.tokens, stepper.ends) == plain
        accepted += stepper.accepted
    return accepted


def test_penalties_count_the_tokens_of_a_draft(stepper: Stepper) -> None:
    """Two ids take turns as each grows dear."""
    settings = [(8, 1.0, 0.0, 0.01 * step) for step in range(1, 30, 3)]
    requests = [
        submission(1, TOKENIZER.encode("abab"), 60, sampling=Sampling(0.0, 0, 1.0, 0.0, 1, 1.0, *each[1:], (), (7, 9)))
        for each in settings
    ]
    assert same(stepper, *requests) > 20


def test_ends_are_where_they_would_be(stepper: Stepper) -> None:
    """At each place: tokens that end the output, in a draft too, from min_new_tokens on, and limits."""
    prompt = TOKENIZER.encode("abababab")
    stepper.run(submission(1, prompt, 60))
    known, to_come = [*prompt, *stepper.tokens[1][:40]], stepper.tokens[1][40:]
    requests = []
    for end in sorted(set(to_come)):
        requests += [submission(1, known, 20, stop_ids=[end], min_new_tokens=least) for least in range(0, 16, 3)]
        requests += [submission(1, known, 20, eos_ids=[end], min_new_tokens=least) for least in (1, 8)]
    requests += [submission(1, known, new) for new in range(1, 12)]
    requests += [submission(1, known, 20, max_length=len(known) + room) for room in range(1, 12)]
    assert same(stepper, *requests) > 100
