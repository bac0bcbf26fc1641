"""Distributions of lengths: what is parsed, what is drawn."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from pellucid_loadtest.lengths import parse_lengths

CONTEXT = 256


def drawn(text: str, count: int = 20_000) -> list[int]:
    generator = random.Random(1)
    lengths = parse_lengths(text)
    return [lengths.draw(generator, CONTEXT) for _ in range(count)]


def test_fixed_is_one_value() -> None:
    assert set(drawn("fixed:32", 100)) == {32}


def test_uniform_reaches_both_ends_evenly() -> None:
    values = drawn("uniform:16:19")
    shares = [values.count(value) / len(values) for value in range(16, 20)]
    assert set(values) == {16, 17, 18, 19}
    assert all(abs(share - 0.25) < 0.02 for share in shares)


def test_lognormal_has_the_median_and_the_spread_it_names() -> None:
    values = drawn("lognormal:480:0.8")
    assert statistics.median(values) == pytest.approx(480, rel=0.03)
    assert statistics.stdev(map(math.log, values)) == pytest.approx(0.8, rel=0.03)


def test_lengths_are_at_least_one_token() -> None:
    values = drawn("lognormal:1:3")
    assert min(values) == 1
    assert max(values) > 100


def test_x_means_contexts() -> None:
    values = drawn("uniform:1x:3x")
    assert CONTEXT <= min(values) < CONTEXT * 1.05
    assert CONTEXT * 2.95 < max(values) <= CONTEXT * 3
    assert set(drawn("fixed:0.5x", 10)) == {CONTEXT // 2}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "32",
        "fixed",
        "fixed:0",
        "fixed:-1",
        "fixed:1.5",
        "fixed:1:2",
        "fixed:nanx",
        "fixed:infx",
        "uniform:2:1",
        "uniform:1:2x",
        "uniform:1",
        "lognormal:48",
        "lognormal:48:-1",
        "lognormal:48:nan",
        "zipf:2:3",
    ],
)
def test_what_is_no_distribution_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="accepted: fixed:N, uniform:LOW:HIGH") as caught:
        parse_lengths(text)
    assert repr(text) in str(caught.value)
