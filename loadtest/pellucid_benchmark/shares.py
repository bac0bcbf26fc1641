"""Which share of the machine's limits a run reached: the least time that its bytes or multiplications take there, by
what was measured around the run, against the time that it took."""

from __future__ import annotations

from collections.abc import Mapping

from pellucid_benchmark.costs import Costs
from pellucid_benchmark.scenarios import Scenario

GIGA = 10**9
_PRODUCTS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "int4": "int8"}
"""By precision: how linear layers multiply. 4-bit weights meet activations of 8 bits."""


def share_of_limit(
    scenario: Scenario, value: float, costs: Costs, precision: str, limits: Mapping[str, float]
) -> float | None:
    """1 is the limit; None where the scenario mixes the two. `value` is in tokens per second, as the scenario has it.

    decode: bytes of weights, keys and values against the read bandwidth. prefill: linear layers against the rate of
    matrix products in their precision, attention against that in the cache's.
    """
    match scenario.measure:
        case "decode":
            context = scenario.prompt_tokens + scenario.new_tokens / 2
            return value * costs.step_bytes(1, context) / (GIGA * limits["read_gb_s"])
        case "prefill":
            linear, attention = costs.prompt_operations(scenario.prompt_tokens)
            cache = "float32" if precision == "float32" else "bfloat16"
            least = linear / limits[_rate(_PRODUCTS[precision])] + attention / limits[_rate(cache)]
            return value / scenario.prompt_tokens * least / GIGA
        case "throughput":
            return None


def _rate(name: str) -> str:
    return f"gemm_{name}_gflop_s"
