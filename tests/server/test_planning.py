"""Prompt lengths around every edge of context and cache, and truncation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid_model.tokenizers.character import CharacterTokenizer
from pellucid_server.engine.messages import LogprobWish, Sampling
from pellucid_server.errors import InvalidRequest, PromptTooLong, RequestTooLarge
from pellucid_server.kv.window import ContextWindow
from pellucid_server.live_request import EngineOptions, Plan
from pellucid_server.planning import (
    ContextWish,
    Wishes,
    check_text_size,
    effective_max_new_tokens,
    kept_by_truncation,
    make_plan,
)
from pellucid_server.served import DefaultSampling, ServedModel


def model(context: int = 32, cache: int = 1000) -> ServedModel:
    return ServedModel(
        name="m",
        tokenizer=None,
        vocab_size=10,
        eos_ids=(2, 3),
        longest_token=4,
        stop_ids=None,
        context_length=context,
        block_size=1,
        block_count=cache,
        native_window=0,
        can_roll=True,
        sampling=DefaultSampling(1.0, 0, 1.0, 0.0),
        default_max_new_tokens=256,
        max_new_tokens_limit=16384,
        overflow="reject",
    )


def wishes(max_new_tokens: int = 8, overflow: str = "reject", ignore_eos: bool = False) -> Wishes:
    sampling = Sampling(1.0, 0, 1.0, 0.0, 0)
    return Wishes("token_ids.ids", sampling, max_new_tokens, 0, (5,), ignore_eos, ContextWish(overflow))


def plan(length: int, max_new_tokens: int = 8, overflow: str = "reject", context: int = 32, cache: int = 1000) -> Plan:
    return make_plan(model(context, cache), wishes(max_new_tokens, overflow), list(range(length)))


def test_an_empty_prompt_is_refused() -> None:
    for overflow in ("reject", "truncate"):
        with pytest.raises(InvalidRequest, match="0 tokens"):
            plan(0, overflow=overflow)


@pytest.mark.parametrize(("length", "room"), [(1, 31), (30, 2), (31, 1)])
def test_what_fits_is_planned_whole(length: int, room: int) -> None:
    made = plan(length, max_new_tokens=100)
    assert (made.prompt_token_count, made.dropped_token_count, len(made.prompt)) == (length, 0, length)
    assert made.max_new_tokens == 100
    assert effective_max_new_tokens(made) == room
    assert made.max_length == 32


def test_a_full_context_is_accepted_only_without_new_tokens() -> None:
    assert effective_max_new_tokens(plan(32, max_new_tokens=0)) == 0
    with pytest.raises(PromptTooLong, match=r"has 32 tokens; the context is 32 tokens.*max_new_tokens = 0"):
        plan(32, max_new_tokens=1)


@pytest.mark.parametrize("length", [33, 64, 10_000])
@pytest.mark.parametrize("max_new_tokens", [0, 1, 100])
def test_longer_prompts_are_refused_with_both_numbers(length: int, max_new_tokens: int) -> None:
    with pytest.raises(PromptTooLong) as caught:
        plan(length, max_new_tokens)
    assert f"{length} tokens" in caught.value.message
    assert "32 tokens" in caught.value.message


def test_the_cache_bounds_a_sequence_below_the_context() -> None:
    made = plan(20, max_new_tokens=100, context=128, cache=32)
    assert (made.max_length, effective_max_new_tokens(made)) == (32, 12)
    plan(32, max_new_tokens=0, context=128, cache=32)
    for length, new in ((32, 1), (40, 0), (40, 8)):
        with pytest.raises(RequestTooLarge, match=rf"{length} prompt tokens .* 32 tokens in all"):
            plan(length, new, context=128, cache=32)


def test_truncation_keeps_the_newest_and_says_how_many_it_dropped() -> None:
    made = plan(100, max_new_tokens=8, overflow="truncate")
    assert made.prompt == list(range(76, 100))
    assert (made.prompt_token_count, made.dropped_token_count) == (100, 76)
    assert plan(24, max_new_tokens=8, overflow="truncate").dropped_token_count == 0
    assert len(plan(100, max_new_tokens=1000, overflow="truncate").prompt) == 16
    assert len(plan(100, max_new_tokens=0, overflow="truncate").prompt) == 32


@given(st.integers(1, 200), st.integers(1, 300), st.integers(0, 300))
def test_truncation_by_its_formula(context: int, length: int, max_new_tokens: int) -> None:
    keep = kept_by_truncation(context, max_new_tokens)
    assert keep == max(-(-context // 2), context - max_new_tokens)
    try:
        made = plan(length, max_new_tokens, "truncate", context)
    except PromptTooLong:
        # Only a context of one token leaves no room for a new one after truncation.
        assert context == 1
        assert max_new_tokens > 0
        return
    assert made.prompt == list(range(length))[-keep:]
    assert made.dropped_token_count == max(0, length - keep)
    assert len(made.prompt) + effective_max_new_tokens(made) <= context


def scored(length: int, wish: LogprobWish, overflow: str = "reject", context: int = 32) -> LogprobWish | None:
    wanted = replace(wishes(0, overflow), options=EngineOptions(prompt_logprobs=wish))
    return make_plan(model(context, cache=2**17), wanted, list(range(length))).options.prompt_logprobs


def test_logprobs_of_a_prompt_begin_within_it() -> None:
    assert scored(8, LogprobWish(2, (5,), 7)) == LogprobWish(2, (5,), 7)
    for start in (8, 9, 2**32 - 1):
        with pytest.raises(InvalidRequest, match=rf"start_position: {start} .* from 0 to 7"):
            scored(8, LogprobWish(start=start))
    # Tokens that were cut off have none; positions count in what is left.
    assert scored(100, LogprobWish(start=50), "truncate") == LogprobWish(start=0)
    assert scored(100, LogprobWish(start=90), "truncate") == LogprobWish(start=22)


def test_logprobs_of_a_prompt_are_bounded_in_all() -> None:
    most = 2**18 // 21
    assert scored(most, LogprobWish(20), context=2**17) == LogprobWish(20)
    with pytest.raises(
        InvalidRequest, match=r"output\.prompt_logprobs: comes to 262164 entries; accepted: at most 262144"
    ):
        scored(most + 1, LogprobWish(20), context=2**17)
    assert scored(most + 1, LogprobWish(20, start=1), context=2**17) is not None


def test_texts_that_cannot_fit_are_refused_unread() -> None:
    check_text_size(model(), wishes(), "x" * 128)
    with pytest.raises(PromptTooLong, match="at least 33 tokens; the context is 32 tokens"):
        check_text_size(model(), wishes(), "x" * 129)
    check_text_size(model(), wishes(overflow="truncate"), "x" * 10_000)


def test_end_ids() -> None:
    assert make_plan(model(), wishes(), [1]).eos_ids == [2, 3]
    assert make_plan(model(), wishes(ignore_eos=True), [1]).eos_ids == []
    assert make_plan(model(), wishes(ignore_eos=True), [1]).stop_ids == [5]


def slide(length: int, wish: ContextWish, max_new_tokens: int = 100, cache: int = 1000) -> Plan:
    served = replace(model(32, cache), tokenizer=CharacterTokenizer.train(["ab"]))
    asked = replace(wishes(max_new_tokens), context=wish)
    return make_plan(served, asked, [int(served.bos_id or 0), *range(1, length)])


@pytest.mark.parametrize(
    ("wish", "window"),
    [
        (ContextWish("roll"), ContextWindow("roll", 4, 28)),
        (ContextWish("roll", sinks=0), ContextWindow("roll", 0, 32)),
        (ContextWish("roll", window=10), ContextWindow("roll", 4, 10)),
        (ContextWish("roll", window=30), ContextWindow("roll", 2, 30)),
        (ContextWish("roll", window=1, sinks=31), ContextWindow("roll", 31, 1)),
        (ContextWish("reencode"), ContextWindow("reencode", 1, 31, 7)),
        (ContextWish("reencode", sinks=0), ContextWindow("reencode", 0, 32, 8)),
        (ContextWish("reencode", window=32), ContextWindow("reencode", 0, 32, 8)),
        (ContextWish("reencode", window=2, hop=2), ContextWindow("reencode", 1, 2, 2)),
        (ContextWish("reencode", window=3), ContextWindow("reencode", 1, 3, 1)),
    ],
)
def test_windows_and_their_defaults(wish: ContextWish, window: ContextWindow) -> None:
    made = slide(5, wish)
    assert made.context == window
    assert (made.max_length, effective_max_new_tokens(made)) == (105, 100)


def test_reencode_without_bos_has_no_sinks() -> None:
    asked = replace(wishes(), context=ContextWish("reencode"))
    assert make_plan(model(), asked, [7, 7]).context.sinks == 0


def test_sliding_takes_prompts_of_any_length_and_says_what_is_not_seen() -> None:
    for length in (31, 32, 33, 10_000):
        made = slide(length, ContextWish("roll"))
        assert len(made.prompt) == made.prompt_token_count == length
        assert made.dropped_token_count == max(0, length - 32)
    assert slide(33, ContextWish("reencode", sinks=0)).dropped_token_count == 8


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        (ContextWish("roll", window=30, sinks=3), "context.window_tokens"),
        (ContextWish("roll", sinks=32), "context.window_tokens"),
        (ContextWish("reencode", window=8, hop=9), "context.hop_tokens"),
        (ContextWish("reencode", hop=32), "context.hop_tokens"),
    ],
)
def test_windows_that_do_not_fit_together_are_refused(wish: ContextWish, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        slide(5, wish)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_cache_that_cannot_hold_the_window_bounds_the_sequence() -> None:
    made = slide(5, ContextWish("roll"), cache=20)
    assert (made.max_length, effective_max_new_tokens(made)) == (20, 15)
    with pytest.raises(RequestTooLarge, match="nor does their window of 32: 21 blocks of 1 tokens"):
        slide(20, ContextWish("roll"), cache=20)
    assert slide(5, ContextWish("roll", window=10), cache=20).max_length == 105
