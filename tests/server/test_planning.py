"""Prompt lengths around every edge of context and cache, and truncation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid_server.engine.messages import Sampling
from pellucid_server.errors import InvalidRequest, PromptTooLong, RequestTooLarge
from pellucid_server.live_request import Plan
from pellucid_server.planning import Wishes, check_text_size, effective_max_new_tokens, kept_by_truncation, make_plan
from pellucid_server.served import DefaultSampling, ServedModel


def model(context: int = 32, cache: int = 1000) -> ServedModel:
    return ServedModel(
        name="m",
        tokenizer=None,
        vocab_size=10,
        eos_ids=(2, 3),
        longest_token=4,
        context_length=context,
        cache_tokens=cache,
        sampling=DefaultSampling(1.0, 0, 1.0, 0.0),
        default_max_new_tokens=256,
        max_new_tokens_limit=16384,
        overflow="reject",
    )


def wishes(max_new_tokens: int = 8, overflow: str = "reject", ignore_eos: bool = False) -> Wishes:
    sampling = Sampling(1.0, 0, 1.0, 0.0, 0)
    return Wishes("token_ids.ids", sampling, max_new_tokens, 0, (5,), ignore_eos, overflow)


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


def test_texts_that_cannot_fit_are_refused_unread() -> None:
    check_text_size(model(), wishes(), "x" * 128)
    with pytest.raises(PromptTooLong, match="at least 33 tokens; the context is 32 tokens"):
        check_text_size(model(), wishes(), "x" * 129)
    check_text_size(model(), wishes(overflow="truncate"), "x" * 10_000)


def test_end_ids() -> None:
    assert make_plan(model(), wishes(), [1]).eos_ids == [2, 3]
    assert make_plan(model(), wishes(ignore_eos=True), [1]).eos_ids == []
    assert make_plan(model(), wishes(ignore_eos=True), [1]).stop_ids == [5]
