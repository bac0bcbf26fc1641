"""Which share of the machine's limits a run reached: the least time that its bytes or multiplications take there, by
what was measured around the run, against the time that it took."""

from __future__ import annotations

from collections.abc import Mapping

from pellucid_benchmark.costs import Costs
from pellucid_benchmark.precisions import PRECISIONS
from pellucid_benchmark.scenarios import Scenario

GIGA = 10**9
_PRODUCTS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "int4": "int8"}
"""How layers of such weights multiply. 4-bit weights meet activations of 8 bits."""
INT8_CACHE_PRODUCTS = 2
"""What meets a number of an int8 cache has 15 bits, and is multiplied as two bytes."""


def share_of_limit(
    scenario: Scenario, value: float, costs: Costs, precision: str, limits: Mapping[str, float]
) -> float | None:
    """1 is the limit; None where the scenario mixes the two. `value` is in tokens per second, as the scenario has it.

    decode: bytes of weights, keys and values against the read bandwidth. prefill: linear layers against the rate of
    matrix products in their precision, attention against that in the cache's. `precision` is one of PRECISIONS.
    """
    match scenario.measure:
        case "decode":
            context = scenario.prompt_tokens + scenario.new_tokens / 2
            return value * costs.step_bytes(1, context) / (GIGA * limits["read_gb_s"])
        case "prefill":
            linear, attention = costs.prompt_operations(scenario.prompt_tokens)
            stored = PRECISIONS[precision]
            attention *= INT8_CACHE_PRODUCTS if stored.cache == "int8" else 1
            least = linear / limits[_rate(_PRODUCTS[stored.weights])] + attention / limits[_rate(stored.cache)]
            return value / scenario.prompt_tokens * least / GIGA
        case "throughput":
            return None


def _rate(name: str) -> str:
    return f"gemm_{name}_gflop_s"
