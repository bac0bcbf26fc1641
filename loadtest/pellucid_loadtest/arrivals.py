"""When requests of an open loop arrive: renewal processes with a given mean rate.

Gaps are exponential (a Poisson process), or gamma distributed with shape `burstiness` and the same mean, so that their
coefficient of variation is 1 / sqrt(burstiness): below 1 arrivals come in bursts, above 1 they come evenly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from pellucid_loadtest.options import GAMMA, LoadOptions


def arrival_times(options: LoadOptions) -> Iterator[float]:
    """Seconds after the start, ascending, without end; a function of the options alone."""
    generator = random.Random(f"{options.seed}/arrivals")
    now = 0.0
    while True:
        now += _gap(generator, options)
        yield now


def _gap(generator: random.Random, options: LoadOptions) -> float:
    if options.arrivals == GAMMA:
        return generator.gammavariate(options.burstiness, 1.0 / (options.rate * options.burstiness))
    return generator.expovariate(options.rate)
