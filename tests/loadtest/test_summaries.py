"""Statistics against numpy's, and against drawings small enough to count."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid_loadtest.summaries import concurrency, percentile, rates, summary

NUMBERS = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=60)


@given(NUMBERS)
def test_summaries_are_exact(samples: list[float]) -> None:
    found = summary(samples)
    assert found.count == len(samples)
    assert found.mean == pytest.approx(numpy.mean(samples), rel=1e-9, abs=1e-6)
    assert found.std == pytest.approx(numpy.std(samples), rel=1e-6, abs=1e-6)
    assert (found.min, found.max) == (min(samples), max(samples))
    for name, percent in {"median": 50, "p90": 90, "p95": 95, "p99": 99}.items():
        assert getattr(found, name) == pytest.approx(numpy.percentile(samples, percent), rel=1e-9, abs=1e-9)


def test_percentiles_lie_between_the_nearest_samples() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 100) == 4.0
    assert percentile([5.0], 99) == 5.0


def test_no_samples_have_no_values() -> None:
    assert summary([]).count == 0
    assert summary([]).p99 is None


def test_concurrency_counts_overlaps_inside_the_window() -> None:
    spans = [(0.0, 4.0), (1.0, 3.0), (2.0, 3.0), (3.0, 5.0)]
    found = concurrency(spans, 0.0, 5.0)
    assert found.peak == 3
    assert found.mean == pytest.approx((4 + 2 + 1 + 2) / 5)
    assert concurrency(spans, 3.0, 5.0).peak == 2, "a span that stops as another starts is not beside it"
    assert concurrency(spans, 4.5, 5.0).peak == 1
    assert concurrency([], 0.0, 1.0).peak == 0


def test_rates_add_up() -> None:
    found = rates([(0.1, 2.0), (0.9, 1.0), (1.0, 4.0), (2.2, 1.0), (9.0, 100.0)], 0.0, 2.5, 1.0)
    assert found == [3.0, 4.0, pytest.approx(2.0)]
