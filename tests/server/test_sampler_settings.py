"""What each sampling parameter does, by itself and in company: penalties, biases, permitted ids, typical-p."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from pellucid_server.engine.messages import Sampling
from pellucid_server.engine.sampler_reference import FLOAT32_MAX
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


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- Penalties ----


def test_repetition_covers_the_prompt_and_presence_and_frequency_do_not(implementation: str) -> None:
    """B27: repetition_penalty skips the prompt's tokens, or presence and frequency penalties count them."""
    near = [2.0, 1.9, -9.0]
    for prompt, output, setting, chosen in (
        ([0], [], sampling(0.0, repetition_penalty=1.5), 1),
        ([], [0], sampling(0.0, repetition_penalty=1.5), 1),
        ([0], [], sampling(0.0, presence_penalty=2.0), 0),
        ([], [0], sampling(0.0, presence_penalty=2.0), 1),
        ([0, 0, 0], [], sampling(0.0, frequency_penalty=2.0), 0),
        ([0], [0], sampling(0.0, frequency_penalty=2.0), 1),
    ):
        assert sample_one(implementation, near, make_row(setting, 0, prompt, output)) == chosen


def test_repetition_divides_above_zero_and_multiplies_below_once_per_token(implementation: str) -> None:
    once = sampling(0.0, repetition_penalty=2.0)
    # 3 becomes 1.5, however often it came; -1 becomes -2.
    assert sample_one(implementation, [3.0, 1.4], make_row(once, 0, [0, 0, 0], [0, 0])) == 0
    assert sample_one(implementation, [3.0, 1.6], make_row(once, 0, [0])) == 1
    assert sample_one(implementation, [-1.0, -1.9], make_row(once, 0, [0])) == 1
    assert sample_one(implementation, [-1.0, -2.1], make_row(once, 0, [0])) == 0


def test_a_frequency_penalty_grows_with_every_occurrence_and_a_presence_penalty_does_not(implementation: str) -> None:
    logits = [1.0, 0.0]
    for setting, switches_after in ((sampling(0.0, frequency_penalty=0.3), 4), (GREEDY, 99)):
        chosen = [sample_one(implementation, logits, make_row(setting, 0, [], [0] * n)) for n in range(8)]
        assert chosen == [0 if n < switches_after else 1 for n in range(8)]
    present = sampling(0.0, presence_penalty=0.9)
    assert {sample_one(implementation, logits, make_row(present, 0, [], [0] * n)) for n in range(8)} == {0}


def test_negative_penalties_encourage(implementation: str) -> None:
    encouraged = make_row(sampling(0.0, presence_penalty=-2.0), 0, [], [1])
    assert sample_one(implementation, [1.0, 0.0], encouraged) == 1


def test_penalties_of_extreme_logits_stay_finite(implementation: str) -> None:
    """A penalty that overflows must not make an id certain for the row to be non-finite, or impossible."""
    setting = sampling(0.0, repetition_penalty=0.01)
    logits = [FLOAT32_MAX, FLOAT32_MAX / 2, -FLOAT32_MAX]
    assert sample_one(implementation, logits, make_row(setting, 0, [0, 1, 2])) == 0
    assert sample_one(implementation, logits, make_row(setting, 0, [0, 1, 2], banned=(0, 1))) == 2


# ---- Biases, allowed ids, constraints ----


def test_biases_add_to_logits_before_penalties(implementation: str) -> None:
    setting = sampling(0.0, logit_bias=((1, 4.0),), repetition_penalty=2.0)
    assert sample_one(implementation, [0.0, -1.0], make_row(setting)) == 1
    # -1 + 4 = 3, halved to 1.5; a penalty before the bias would have left -2 + 4 = 2.
    assert sample_one(implementation, [1.6, -1.0], make_row(setting, 0, [1])) == 0


def test_only_allowed_ids_are_chosen(implementation: str) -> None:
    setting = sampling(5.0, allowed_ids=(1, 3, 1, 99))
    seen = {sample_one(implementation, [9.0, 0.0, 9.0, 0.0], make_row(setting, n)) for n in range(100)}
    assert seen == {1, 3}


def test_only_permitted_ids_are_chosen_in_every_place_of_a_word(implementation: str) -> None:
    for only in (0, 31, 32, 63, 64, 99):
        assert sample_one(implementation, [1.0] * 100, make_row(GREEDY, permitted={only})) == only


def test_what_is_allowed_permitted_and_not_banned_must_agree(implementation: str) -> None:
    setting = sampling(0.0, allowed_ids=(1, 2, 3))
    logits = [9.0, 8.0, 7.0, 6.0, 5.0]
    assert sample_one(implementation, logits, make_row(setting, permitted={0, 2, 3}, banned=(2,))) == 3
    assert sample_one(implementation, logits, make_row(setting, permitted={0, 4})) is None
    assert sample_one(implementation, logits, make_row(setting, permitted=set())) is None


@pytest.mark.parametrize("hidden", ["allowed", "permitted", "banned"])
def test_no_setting_hides_a_non_finite_row(implementation: str, hidden: str) -> None:
    """B22: non-finite logits end their own request, whatever else it asks for."""
    setting = sampling(
        repetition_penalty=2.0, logit_bias=((1, -100.0),), allowed_ids=(0,) if hidden == "allowed" else ()
    )
    row = make_row(
        setting,
        0,
        [1],
        [1],
        permitted={0} if hidden == "permitted" else None,
        banned=(1,) if hidden == "banned" else (),
    )
    tokens = make_sampler(implementation, 2).sample(torch.tensor([[1.0, math.nan], [1.0, 0.0]]), [row, row])
    assert tokens[0] is None
    assert tokens[1] is not None


def test_rows_with_settings_of_their_own_do_not_depend_on_each_other(implementation: str) -> None:
    """B21: a sampler built for the first request governs the whole running batch."""
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.normal(size=(12, 300)).astype(np.float32) * 3)
    settings = [
        GREEDY,
        sampling(2.0, seed=7),
        sampling(0.5, seed=9, frequency_penalty=1.5),
        sampling(1.0, seed=4, logit_bias=((5, 4.0),), typical_p=0.5),
        sampling(1.0, seed=4, allowed_ids=(1, 2, 3)),
        sampling(1.0, top_k=5, seed=4, repetition_penalty=1.3),
    ]
    histories = [generator.integers(0, 300, 20).tolist() for _ in range(12)]
    rows = [
        make_row(settings[i % 6], i, histories[i], histories[-i], set(range(i, 300, 2)) if i > 8 else None)
        for i in range(12)
    ]
    sampler = make_sampler(implementation, 300)
    alone = [sampler.sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(12)]
    assert sampler.sample(logits, rows) == alone
    assert sampler.sample(logits.flip(0), rows[::-1]) == alone[::-1]
    assert len(set(alone)) > 6


@pytest.mark.parametrize("top_k", [0, 2, 3, 1000, 2**31 - 1])
def test_top_k_counts_what_is_left_of_the_vocabulary(implementation: str, top_k: int) -> None:
    """B16: a top_k of more than there is kills the sampler."""
    row = [make_row(sampling(3.0, top_k=top_k, seed=1), n, permitted={1, 2}) for n in range(50)]
    assert {sample_one(implementation, [5.0, 1.0, 1.0, 5.0], r) for r in row} == {1, 2}


def test_seed_zero_is_a_seed_and_so_is_the_largest(implementation: str) -> None:
    """B25: seed 0 is read as "no seed"."""
    logits = [0.0] * 50

    def run(seed: int) -> list[int | None]:
        return [sample_one(implementation, logits, make_row(sampling(seed=seed), n)) for n in range(20)]

    runs = {seed: run(seed) for seed in (0, 1, 2**32, 2**63, 2**64 - 1)}
    assert all(run(seed) == tokens for seed, tokens in runs.items())
    assert len({tuple(tokens) for tokens in runs.values()}) == len(runs)


# ---- Typical-p ----


def test_typical_p_prefers_what_is_as_surprising_as_the_average(implementation: str) -> None:
    """One likely id among many of middling probability: the likely one is untypical, and so is the rare one."""
    probabilities = [0.3, *[0.05] * 13, 0.001, 0.049]
    logits = [math.log(p) for p in probabilities]
    rows = [make_row(sampling(typical_p=0.48), n) for n in range(400)]
    assert {sample_one(implementation, logits, row) for row in rows} == set(range(1, 11))


def test_typical_p_takes_the_lowest_ids_at_its_edge_and_never_leaves_nothing(implementation: str) -> None:
    rows = [make_row(sampling(typical_p=0.5), n) for n in range(100)]
    assert {sample_one(implementation, [0.0] * 4, row) for row in rows} == {0, 1}
    tiny = [make_row(sampling(typical_p=1e-9), n) for n in range(20)]
    assert {sample_one(implementation, [0.0, 3.0, -2.0], row) for row in tiny} == {1}


# ---- Distributions ----

_PROBABILITIES = [0.30, 0.25, 0.15, 0.12, 0.08, 0.06, 0.03, 0.01]


def _penalized(presence: float = 0.0, frequency: float = 0.0) -> list[float]:
    """Weights after ids 0, 0 and 2 were in the output."""
    counts = (2, 0, 1, 0, 0, 0, 0, 0)
    return [p * math.exp(-presence * (n > 0) - frequency * n) for p, n in zip(_PROBABILITIES, counts, strict=True)]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (sampling(presence_penalty=0.5), _penalized(presence=0.5)),
        (sampling(frequency_penalty=-0.4), _penalized(frequency=-0.4)),
        (sampling(2.0, presence_penalty=1.0, frequency_penalty=0.5), [p**0.5 for p in _penalized(1.0, 0.5)]),
        # Logarithms are below 0 and multiplied, for the ids of the prompt (1) and of the output.
        (sampling(repetition_penalty=1.5), [p**1.5 if i < 3 else p for i, p in enumerate(_PROBABILITIES)]),
        (sampling(logit_bias=((3, math.log(3)),)), [3 * p if i == 3 else p for i, p in enumerate(_PROBABILITIES)]),
        (sampling(allowed_ids=(1, 4, 5)), [0, 0.25, 0, 0, 0.08, 0.06, 0, 0]),
        # The entropy is 1.76 nats, a surprise of probability 0.17: nearest are 0.15, 0.12, 0.25, then 0.3.
        (sampling(typical_p=0.5), [0, 0.25, 0.15, 0.12, 0, 0, 0, 0]),
        (sampling(typical_p=0.6), [0.30, 0.25, 0.15, 0.12, 0, 0, 0, 0]),
    ],
)
def test_tokens_follow_the_distribution(setting: Sampling, expected: list[float]) -> None:
    draws = 20000
    logits = torch.tensor([_PROBABILITIES]).log().repeat(draws, 1)
    row = make_row(setting, 0, [1], [0, 0, 2])
    rows = [dataclasses.replace(row, output_index=n) for n in range(draws)]
    counts = count_draws(logits, rows)
    possible = np.array(expected) > 0
    assert counts[~possible].sum() == 0
    assert_follows(counts[possible], [weight for weight in expected if weight > 0])


def test_each_of_several_sequences_follows_the_distribution_by_itself() -> None:
    draws = 6000
    logits = torch.tensor([_PROBABILITIES]).log().repeat(draws, 1)
    seen = set()
    for sequence in range(3):
        row = dataclasses.replace(make_row(sampling(seed=5)), sequence_index=sequence)
        rows = [dataclasses.replace(row, output_index=n) for n in range(draws)]
        counts = count_draws(logits, rows)
        assert_follows(counts, _PROBABILITIES)
        seen.add(tuple(counts))
    assert len(seen) == 3
