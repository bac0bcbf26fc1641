"""Metrics without locks read as prometheus_client's own do."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference

from pellucid_server.tallies import Histogram, ReadCounter

BOUNDS = (0.001, 0.5, 1, 20)


@given(st.lists(st.sampled_from((0.0, *BOUNDS, math.nextafter(0.5, 0), 0.7, 1.0000001, 1e9)) | st.floats(0, 100)))
def test_a_histogram_is_written_out_like_prometheus_clients(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Histogram(ours, "n", "Help", ("model_name", "phase"), BOUNDS).labels("m", "decode")
    reference = Reference("n", "Help", ["model_name", "phase"], buckets=BOUNDS, registry=theirs).labels("m", "decode")
    for value in values:
        tally.observe(value)
        reference.observe(value)
    assert _lines(ours) == _lines(theirs)


def test_label_sets_are_counted_apart_and_the_same_one_together() -> None:
    registry = CollectorRegistry()
    histogram = Histogram(registry, "n", "Help", ("phase",), BOUNDS)
    for phase, value in (("a", 0.4), ("b", 0.6), ("a", 3.0)):
        histogram.labels(phase).observe(value)
    counts = [registry.get_sample_value("n_count", {"phase": phase}) for phase in "ab"]
    assert (counts, registry.get_sample_value("n_sum", {"phase": "a"})) == ([2, 1], 3.4)


def test_a_counter_is_asked_at_every_scrape_and_found_by_name() -> None:
    registry, count = CollectorRegistry(), [3]
    ReadCounter(registry, "tokens", "Help", "m", lambda: count[0])
    Histogram(registry, "n", "Help", ("phase",), BOUNDS).labels("a")
    assert registry.get_sample_value("tokens_total", {"model_name": "m"}) == 3
    count[0] = 5
    assert registry.get_sample_value("tokens_total", {"model_name": "m"}) == 5
    found = registry.restricted_registry(["tokens_total", "n_count"]).collect()
    assert sorted(sample.name for family in found for sample in family.samples) == ["n_count", "tokens_total"]


def _lines(registry: CollectorRegistry) -> list[str]:
    """The exposition; prometheus_client is told elsewhere to leave out the times of creation."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
