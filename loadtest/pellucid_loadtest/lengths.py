"""Distributions of lengths in tokens, written as text: `fixed:32`, `uniform:16:64`, `lognormal:48:0.8`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

ACCEPTED = "fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA; a length such as 2x is that many contexts"
LONGEST = 10_000_000.0
"""In tokens, or in contexts."""
SMALLEST_SIGMA, LARGEST_SIGMA = 0.0, 10.0


@dataclass(frozen=True)
class Length:
    """`value` tokens, or `value` times the model's context."""

    value: float
    in_contexts: bool = False

    def tokens(self, context: int) -> float:
        return self.value * context if self.in_contexts else self.value


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths. `draw` never returns less than 1.

    kind   fixed: always `low`. uniform: whole numbers from `low` to `high`, both included.
           lognormal: median `low`; the logarithm has the standard deviation `sigma`.
    """

    kind: str
    low: Length
    high: Length
    sigma: float = 0.0

    def draw(self, generator: random.Random, context: int) -> int:
        low, high = self.low.tokens(context), self.high.tokens(context)
        if self.kind == "uniform":
            drawn = float(generator.randint(round(low), round(high)))
        elif self.kind == "lognormal":
            drawn = min(low * math.exp(generator.gauss(0.0, self.sigma)), LONGEST)
        else:
            drawn = low
        return max(1, round(drawn))


def parse_lengths(text: str) -> Lengths:
    """Raises ValueError that names the text and what is accepted."""
    kind, _, rest = text.strip().partition(":")
    parts = rest.split(":") if rest else []
    try:
        if kind == "fixed" and len(parts) == 1:
            length = _length(parts[0])
            return Lengths(kind, length, length)
        if kind == "uniform" and len(parts) == 2:
            return _uniform(_length(parts[0]), _length(parts[1]))
        if kind == "lognormal" and len(parts) == 2:
            length, sigma = _length(parts[0]), float(parts[1])
            if not SMALLEST_SIGMA <= sigma <= LARGEST_SIGMA:
                raise ValueError
            return Lengths(kind, length, length, sigma)
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not a length distribution; accepted: {ACCEPTED}")


def _uniform(low: Length, high: Length) -> Lengths:
    if low.in_contexts != high.in_contexts or low.value > high.value:
        raise ValueError
    return Lengths("uniform", low, high)


def _length(text: str) -> Length:
    in_contexts = text.endswith("x")
    value = float(text[:-1]) if in_contexts else float(int(text))
    if not (0 < value <= LONGEST):
        raise ValueError
    return Length(value, in_contexts)
