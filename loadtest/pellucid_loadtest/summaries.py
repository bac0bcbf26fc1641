"""Exact statistics of raw samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Summary:
    """Of the samples that there are; every value but `count` is None where there are none."""

    count: int
    mean: float | None
    std: float | None
    min: float | None
    median: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None


def summary(samples: Iterable[float]) -> Summary:
    ordered = sorted(samples)
    if not ordered:
        return Summary(0, None, None, None, None, None, None, None, None)
    count = len(ordered)
    mean = math.fsum(ordered) / count
    std = math.sqrt(math.fsum((each - mean) ** 2 for each in ordered) / count)
    median, p90, p95, p99 = (percentile(ordered, each) for each in PERCENTILES)
    return Summary(count, mean, std, ordered[0], median, p90, p95, p99, ordered[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest of the ascending samples.

    Definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996).
    """
    rank = (len(ordered) - 1) * percent / 100.0
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True)
class Concurrency:
    """How many spans were open. `steps` holds (time, number open from then on), ascending in time."""

    peak: int
    mean: float
    steps: list[tuple[float, int]]


def concurrency(spans: Iterable[tuple[float, float]], begin: float, end: float) -> Concurrency:
    """Of spans [start, stop) seen within [begin, end); a span that stops as another starts is not beside it."""
    changes = [change for start, stop in spans if stop > start for change in ((start, 1), (stop, -1))]
    steps: list[tuple[float, int]] = []
    opened = 0
    for moment, change in sorted(changes):
        opened += change
        if steps and steps[-1][0] == moment:
            steps.pop()
        steps.append((moment, opened))
    peak, area = 0, 0.0
    for (start, number), (stop, _) in itertools.pairwise([*steps, (math.inf, 0)]):
        seen = min(stop, end) - max(start, begin)
        if seen > 0:
            peak = max(peak, number)
            area += number * seen if number else 0.0
    return Concurrency(peak, area / (end - begin) if end > begin else 0.0, steps)


def rates(weighted: Iterable[tuple[float, float]], begin: float, end: float, bucket: float) -> list[float]:
    """[ceil((end - begin) / bucket)] sums of weights per second in each bucket; the last one may be shorter."""
    count = max(1, math.ceil((end - begin) / bucket - 1e-9))
    sums = [0.0] * count
    for moment, weight in weighted:
        if begin <= moment < end:
            sums[min(int((moment - begin) / bucket), count - 1)] += weight
    return [each / min(bucket, end - begin - index * bucket) for index, each in enumerate(sums)]
