"""Metrics that are written for every token or step, and cost no more than that.

The event loop alone writes them and a scrape, in another thread, reads them: so there is no lock, and what can be read
where it is kept anyway is not written at all. prometheus_client has the other metrics, and writes all of them out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString


class Tally:
    """How many of the observed values lie in each bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, values up to it) for each bucket, and the sum."""
        totals = accumulate(list(self._counts))
        names = map(floatToGoString, (*self._bounds, INF))
        return list(zip(names, totals, strict=True)), self._sum


class Histogram(Collector):
    """Tallies under one name, one for each set of label values. `bounds`: upper bounds of the buckets, ascending."""

    def __init__(
        self, registry: CollectorRegistry, name: str, help: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._help, self._labels, self._bounds = name, help, labels, tuple(bounds)
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        return self._tallies.setdefault(values, Tally(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, tally in self._tallies.items():
            family.add_metric(values, *tally.read())
        yield family

    describe = collect


class ReadCounter(Collector):
    """A counter whose value `read` knows at any time."""

    def __init__(
        self, registry: CollectorRegistry, name: str, help: str, model_name: str, read: Callable[[], int]
    ) -> None:
        self._name, self._help, self._model, self._read = name, help, model_name, read
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._help, labels=["model_name"])
        family.add_metric([self._model], self._read())
        yield family

    describe = collect
