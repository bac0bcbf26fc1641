"""Arrival processes: their rate, their burstiness, their seed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import pytest

from pellucid_loadtest.arrivals import arrival_times
from pellucid_loadtest.options import LoadOptions

COUNT = 40_000


def gaps(options: LoadOptions) -> list[float]:
    times = [0.0, *itertools.islice(arrival_times(options), COUNT)]
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("arrivals", "burstiness", "variation"),
    [("poisson", "1", 1.0), ("gamma", "1", 1.0), ("gamma", "0.25", 2.0), ("gamma", "4", 0.5)],
)
def test_mean_and_variation_of_the_gaps(
    make_options: Callable[..., LoadOptions], arrivals: str, burstiness: str, variation: float
) -> None:
    found = gaps(make_options(arrivals=arrivals, burstiness=burstiness, rate="8"))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(1 / 8, rel=0.03)
    assert statistics.pstdev(found) / mean == pytest.approx(variation, rel=0.05)
    assert min(found) >= 0


def test_poisson_counts_have_the_variance_of_their_mean(make_options: Callable[..., LoadOptions]) -> None:
    times = itertools.islice(arrival_times(make_options(arrivals="poisson", rate="5")), COUNT)
    seconds = [int(moment) for moment in times]
    counts = [0] * seconds[-1]
    for second in seconds:
        if second < len(counts):
            counts[second] += 1
    assert statistics.pvariance(counts) / statistics.fmean(counts) == pytest.approx(1.0, rel=0.06)


def test_the_seed_decides(make_options: Callable[..., LoadOptions]) -> None:
    def first(seed: str) -> list[float]:
        return list(itertools.islice(arrival_times(make_options(arrivals="gamma", seed=seed)), 50))

    assert first("1") == first("1")
    assert first("1") != first("2")
