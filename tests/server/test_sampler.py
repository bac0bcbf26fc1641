"""The sampler's implementations give the same token for every input, and the tokens have the right distribution."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pellucid_server.engine.messages import Sampling
from pellucid_server.engine.sampler import SamplerRow
from pellucid_server.engine.sampler_reference import gumbel_noise, philox, sample_row
from pellucid_testing.sampling import (
    GREEDY,
    IMPLEMENTATIONS,
    assert_follows,
    count_draws,
    make_row,
    make_sampler,
    sample_one,
    sampling,
)

INF = math.inf


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- The noise ----


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert philox(counter, key) == words  # type: ignore[arg-type]


def test_noise_has_the_mean_and_variance_of_a_gumbel_variable() -> None:
    noise = [gumbel_noise(3, 0, output, token) for output in range(40) for token in range(100)]
    assert np.mean(noise) == pytest.approx(0.5772, abs=0.07)
    assert np.var(noise) == pytest.approx(math.pi**2 / 6, abs=0.2)


def test_noise_reads_every_part_of_its_key() -> None:
    noises = {
        gumbel_noise(seed, sequence, output, token)
        for seed in (0, 1, 1 << 32, (1 << 64) - 1)
        for sequence in (0, 1)
        for output in (0, 1)
        for token in (0, 1)
    }
    assert len(noises) == 32


# ---- One answer from all implementations ----

_LOGIT = st.one_of(
    st.integers(-3, 3).map(float),
    st.sampled_from([0.0, -0.0, -INF, 60000.0, -60000.0, 3.4e38, -3.4e38, 1e-40]),
    st.floats(-20, 20, width=32),
)
_TOKENS = st.integers(0, 64)  # a few of them beyond the vocabulary
_SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1e-4, 0.1, 0.7, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 10, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 0.999, math.exp(-1.0)]),
    seed=st.sampled_from([0, 1, 2**32, 2**63, 2**64 - 1]),
    typical_p=st.sampled_from([1.0, 1.0, 1e-9, 0.2, 0.9, 0.999999]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.01, 0.7, 1.3, 100.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.3, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.1, 2.0]),
    logit_bias=st.dictionaries(_TOKENS, st.sampled_from([-100.0, -0.7, 0.0, 1e-9, 3.0, 100.0]), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    allowed_ids=st.one_of(st.just(()), st.lists(_TOKENS, max_size=8).map(tuple)),
)


@given(
    logits=st.lists(_LOGIT, min_size=1, max_size=60),
    sampling=_SAMPLING,
    banned=st.lists(st.integers(0, 59), max_size=4).map(tuple),
    prompt=st.lists(_TOKENS, max_size=5),
    output=st.lists(_TOKENS, max_size=8),
    permitted=st.none() | st.sets(_TOKENS),
    output_index=st.sampled_from([0, 1, 2**32 - 1]),
    beyond=st.lists(st.sampled_from([9.0, INF, math.nan]), max_size=2),
)
@example([0.0, -0.0, 0.0], sampling(top_k=2), (), [], [], None, 0, [])
@settings(max_examples=250, deadline=None)
def test_every_implementation_gives_the_reference_token(
    logits: list[float],
    sampling: Sampling,
    banned: tuple[int, ...],
    prompt: list[int],
    output: list[int],
    permitted: set[int] | None,
    output_index: int,
    beyond: list[float],
) -> None:
    size = len(logits)
    row = make_row(sampling, output_index, prompt, output, permitted, banned)
    rows = [dataclasses.replace(row, output_index=output_index ^ i, sequence_index=i % 2) for i in range(8)]
    single = np.array(logits, np.float32).tolist()
    expected = [
        sample_row(single, size, sampling, banned, r.sequence_index, r.output_index, prompt, output, permitted)
        for r in rows
    ]
    matrix = torch.tensor([[*logits, *beyond]] * len(rows), dtype=torch.float32)
    for name in IMPLEMENTATIONS:
        assert make_sampler(name, size).sample(matrix, rows) == expected, name


@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    rounded=st.booleans(),
    vocab_size=st.sampled_from([255, 256, 257, 1000, 3000]),
    setting=_SAMPLING,
    top_k=st.sampled_from([0, 0, 50, 127, 128, 129, 900]),
    share=st.sampled_from([0, 2, 32]),
)
@settings(max_examples=40, deadline=None)
def test_every_implementation_gives_the_reference_token_over_larger_vocabularies(
    seed: int, spread: float, rounded: bool, vocab_size: int, setting: Sampling, top_k: int, share: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=vocab_size).astype(np.float32) * np.float32(spread)
    if rounded:
        logits = np.round(logits)
    prompt, output = (generator.integers(0, vocab_size + 10, 40).tolist() for _ in range(2))
    permitted = set(np.flatnonzero(generator.integers(0, share, vocab_size)).tolist()) if share else None
    setting = msgspec.structs.replace(setting, top_k=top_k, seed=seed, allowed_ids=())
    expected = sample_row(logits.tolist(), vocab_size, setting, (), 0, seed % 97, prompt, output, permitted)
    row = make_row(setting, seed % 97, prompt, output, permitted)
    for name in IMPLEMENTATIONS:
        assert make_sampler(name, vocab_size).sample(torch.from_numpy(logits[None]), [row]) == [expected], name


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_top_k_of_sorted_logits(implementation: str, order: str) -> None:
    logits = torch.arange(5000, dtype=torch.float32)[None] / 100
    if order == "descending":
        logits = logits.flip(1)
    for output in range(30):
        setting = sampling(temperature=5.0, top_k=40, seed=9)
        (token,) = make_sampler(implementation, 5000).sample(logits, [SamplerRow(setting, (), output)])
        assert token == sample_row(logits[0].tolist(), 5000, setting, (), 0, output)


# ---- The rules, one by one ----


def test_greedy_takes_the_lowest_of_equal_logits(implementation: str) -> None:
    assert sample_one(implementation, [1, 5, -INF, 5, 5], SamplerRow(GREEDY, (), 0)) == 1
    assert sample_one(implementation, [-0.0, 0.0], SamplerRow(GREEDY, (), 0)) == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-5, 1e-4])
@pytest.mark.parametrize("logits", [[-60000, 60000, 59000, 0], [1, 1.5, 1.25, -3], [-3e38, 3e38, 0, 1]])
def test_tiny_temperatures_are_argmax(implementation: str, temperature: float, logits: list[float]) -> None:
    for output in range(20):
        assert sample_one(implementation, logits, SamplerRow(sampling(temperature), (), output)) == 1


@pytest.mark.parametrize("top_p", [1e-9, 1e-4])
def test_tiny_top_p_is_argmax(implementation: str, top_p: float) -> None:
    for output in range(20):
        assert sample_one(implementation, [0, 0.1, 0, 0], SamplerRow(sampling(top_p=top_p), (), output)) == 1


def test_top_k_of_one_is_argmax_and_of_the_vocabulary_or_more_is_off(implementation: str) -> None:
    logits = [0.5, 2.0, 2.0, -1.0]
    for output in range(40):
        assert sample_one(implementation, logits, SamplerRow(sampling(2.0, top_k=1), (), output)) == 1
        off = sample_one(implementation, logits, SamplerRow(sampling(2.0), (), output))
        for top_k in (4, 5, 2**31 - 1):
            assert sample_one(implementation, logits, SamplerRow(sampling(2.0, top_k=top_k), (), output)) == off


def test_top_k_takes_lower_ids_at_its_edge(implementation: str) -> None:
    logits = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    seen = {sample_one(implementation, logits, SamplerRow(sampling(top_k=3), (), i)) for i in range(200)}
    assert seen == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_lower_ids_at_its_edge(implementation: str) -> None:
    half = [0.0, 0.0]
    assert {sample_one(implementation, half, SamplerRow(sampling(top_p=0.5), (), i)) for i in range(50)} == {0}
    assert {sample_one(implementation, half, SamplerRow(sampling(top_p=0.51), (), i)) for i in range(50)} == {0, 1}


def test_top_p_sees_what_top_k_left(implementation: str) -> None:
    # Of all four, token 0 has a quarter; of the two that top-k leaves, it has half.
    row = [SamplerRow(sampling(top_k=2, top_p=0.5), (), i) for i in range(50)]
    assert {sample_one(implementation, [0.0] * 4, r) for r in row} == {0}


def test_min_p_is_relative_to_the_likeliest(implementation: str) -> None:
    logits = [0.0, math.log(0.31), math.log(0.29)]
    seen = {sample_one(implementation, logits, SamplerRow(sampling(min_p=0.3), (), i)) for i in range(200)}
    assert seen == {0, 1}


@pytest.mark.parametrize("setting", [GREEDY, sampling(5.0), sampling(5.0, top_k=2), sampling(5.0, top_p=0.9)])
def test_banned_ids_and_ids_beyond_the_vocabulary_are_never_chosen(implementation: str, setting: Sampling) -> None:
    logits = [9.0, 1.0, 9.0, 2.0, 99.0, math.nan]
    seen = {sample_one(implementation, logits, SamplerRow(setting, (0, 2), i), vocab_size=4) for i in range(100)}
    assert seen == ({3} if setting is GREEDY else {1, 3})


@pytest.mark.parametrize("setting", [GREEDY, sampling(), sampling(top_k=2), sampling(top_p=0.5), sampling(min_p=0.1)])
@pytest.mark.parametrize("logits", [[1, math.nan, 2], [math.nan] * 3, [1, INF, 2], [-INF] * 3])
def test_non_finite_rows_have_no_answer_and_leave_their_neighbours_alone(
    implementation: str, setting: Sampling, logits: list[float]
) -> None:
    sampler = make_sampler(implementation, 3)
    rows = [SamplerRow(setting, (), 4)] * 3
    good = [0.5, 0.25, -INF]
    tokens = sampler.sample(torch.tensor([good, logits, good]), rows)
    assert tokens[1] is None
    assert tokens[0] == tokens[2] == sample_one(implementation, good, rows[0]) != 2


def test_a_row_whose_ids_are_all_banned_has_no_answer(implementation: str) -> None:
    assert sample_one(implementation, [1.0, 2.0], SamplerRow(sampling(), (0, 1), 0)) is None


def test_a_banned_id_does_not_hide_a_non_finite_row(implementation: str) -> None:
    assert sample_one(implementation, [1.0, math.nan], SamplerRow(GREEDY, (1,), 0)) is None


def test_rows_do_not_depend_on_each_other_or_on_threads(implementation: str) -> None:
    generator = np.random.default_rng(5)
    logits = torch.from_numpy(generator.normal(size=(24, 6000)).astype(np.float32) * 3)
    choices = [GREEDY, sampling(0.8, seed=1), sampling(1.5, top_k=50, seed=2), sampling(1.0, top_p=0.9, min_p=0.01)]
    rows = [SamplerRow(choices[i % 4], tuple(range(i % 3)), i, i % 2) for i in range(24)]
    alone = [make_sampler(implementation, 5990).sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(24)]
    for threads in (1, 2, 5):
        assert make_sampler(implementation, 5990, threads).sample(logits, rows) == alone
    assert make_sampler(implementation, 5990, 2).sample(logits.flip(0), rows[::-1]) == alone[::-1]
    assert len(set(alone)) > 12


def test_a_row_that_is_used_again_is_a_new_one_at_its_new_place(implementation: str) -> None:
    setting, sampler = sampling(temperature=1.5, seed=11), make_sampler(implementation, 40)
    logits = torch.zeros(3, 40)
    again, banned, penalized = make_row(setting), make_row(setting, banned=(3,)), sampling(repetition_penalty=2.0)
    seen = set()
    for place in range(30):
        again.output_index = banned.output_index = place
        new = [
            make_row(penalized, place, prompt=[1, 2]),
            make_row(setting, place),
            make_row(setting, place, banned=(3,)),
        ]
        tokens = sampler.sample(logits, [new[0], again, banned])
        assert tokens == sampler.sample(logits, new)
        seen.add(tokens[1])
    assert len(seen) > 10


def test_logits_need_not_be_contiguous(implementation: str) -> None:
    wide = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    rows = [SamplerRow(sampling(seed=i), (), 0) for i in range(3)]
    sampler = make_sampler(implementation, 20)
    expected = sampler.sample(wide[:, 10:30].contiguous(), rows)
    assert sampler.sample(wide[:, 10:30], rows) == expected
    assert sampler.sample(wide[:, 10:30].t().contiguous().t(), rows) == expected


def test_an_empty_step_samples_nothing(implementation: str) -> None:
    assert make_sampler(implementation, 5).sample(torch.empty(0, 5), []) == []


def test_wrong_logits_are_refused(implementation: str) -> None:
    sampler, row = make_sampler(implementation, 5), SamplerRow(GREEDY, (), 0)
    with pytest.raises(ValueError, match="float32 on the CPU"):
        sampler.sample(torch.zeros(1, 5, dtype=torch.bfloat16), [row])
    for shape in ((1, 4), (2, 5), (5,)):
        with pytest.raises(ValueError, match=r"logits must be \[1, 5 or more\]"):
            sampler.sample(torch.zeros(shape), [row])


# ---- The distribution ----

_PROBABILITIES = [0.30, 0.25, 0.15, 0.12, 0.08, 0.06, 0.03, 0.01]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (sampling(1.0), _PROBABILITIES),
        (sampling(0.5), [p**2 for p in _PROBABILITIES]),
        (sampling(2.0), [p**0.5 for p in _PROBABILITIES]),
        (sampling(1.0, top_k=3), _PROBABILITIES[:3]),
        (sampling(1.0, top_p=0.75), _PROBABILITIES[:4]),
        (sampling(1.0, top_p=0.95), _PROBABILITIES[:6]),
        (sampling(1.0, min_p=0.25), _PROBABILITIES[:5]),
        (sampling(1.0, top_k=7, top_p=0.95, min_p=0.15), _PROBABILITIES[:6]),
    ],
)
def test_tokens_follow_the_distribution(setting: Sampling, expected: list[float]) -> None:
    draws = 20000
    logits = torch.tensor([_PROBABILITIES]).log().flip(1).repeat(draws, 1)
    rows = [SamplerRow(setting, (), output) for output in range(draws)]
    counts = count_draws(logits, rows)[::-1]
    assert counts[len(expected) :].sum() == 0
    assert_follows(counts[: len(expected)], expected)


def test_consecutive_draws_and_sequences_are_independent() -> None:
    draws = 20000
    rows = [SamplerRow(sampling(seed=11), (), i, sequence) for i in range(draws) for sequence in (0, 1)]
    tokens = make_sampler(IMPLEMENTATIONS[0], 2).sample(torch.zeros(2 * draws, 2), rows)
    first, second = np.array(tokens[0::2], float), np.array(tokens[1::2], float)
    for a, b in ((first, second), (first[:-1], first[1:])):
        assert abs(float(np.corrcoef(a, b)[0, 1])) < 0.03
