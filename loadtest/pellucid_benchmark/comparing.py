"""Pellucid's medians against those of its peers, and against what it aims at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SAME = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "q8_0": "int8", "q4_0": "int4"}
"""What peers call the precisions, in Pellucid's words."""

Report = Mapping[str, Any]
"""What bench.json holds."""


def is_peer(engine: str) -> bool:
    return not engine.startswith("pellucid:")


def precision_of(engine: str) -> str:
    """Of the weights: "llama.cpp:q8_0" and "pellucid:int8+int8-cache" -> "int8"."""
    name = engine.partition(":")[2].partition("+")[0]
    return _SAME.get(name, name)


class Medians:
    """One model's medians in tokens per second, by engine and scenario."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._values = {(each["engine"], each["scenario"]): each["value"] for each in model["summaries"]}
        self.engines = list(dict.fromkeys(each["engine"] for each in model["summaries"]))
        self.scenarios = list(dict.fromkeys(each["scenario"] for each in model["summaries"]))

    def best_peer(self, scenario: str, precision: str | None = None) -> float | None:
        """The fastest one, of a precision or of any; None where there is none."""
        return max(
            (
                value
                for (engine, name), value in self._values.items()
                if name == scenario and is_peer(engine) and precision in (None, precision_of(engine))
            ),
            default=None,
        )

    def ratio(self, engine: str, scenario: str, against: str) -> float | None:
        """Of an engine to another one, or to the best peer: "best bfloat16", "best". None where one is missing."""
        value = self._values.get((engine, scenario))
        if against.partition(" ")[0] == "best":
            other = self.best_peer(scenario, against.partition(" ")[2] or None)
        else:
            other = self._values.get((against, scenario))
        return value / other if value and other else None


@dataclass(frozen=True)
class Aim:
    """What a figure should come to."""

    what: str
    measured: float
    aim: float
    at_most: bool = False
    unit: str = ""


_RATIOS = (
    ("smollm2", "single", "bfloat16", "llama.cpp:bf16", 1.2),
    ("smollm2", "single", "int8", "llama.cpp:q8_0", 1.8),
    ("smollm2", "single", "int4", "llama.cpp:q4_0", 1.8),
    ("smollm2", "streams-8", "bfloat16", "best bfloat16", 1.5),
    ("smollm2", "streams-8", "int8", "best", 2.0),
    ("smollm2", "streams-32", "bfloat16", "best bfloat16", 1.25),
    ("smollm2", "streams-32", "int8", "best", 1.8),
    ("smollm2", "prefill-512", "bfloat16", "openvino:bf16", 1.05),
    ("smollm2", "prefill-512", "int8", "openvino:bf16", 1.6),
    ("smollm2", "prefill-1900", "bfloat16", "vllm:bfloat16", 1.25),
    ("smollm2", "prefill-1900", "int8", "vllm:bfloat16", 1.6),
    ("tiny", "single", "float32", "ctranslate2:float32", 1.0),
    ("tiny", "streams-32", "float32", "best", 1.5),
)
"""(model, scenario, Pellucid's precision, against whom, the ratio aimed at)."""

BANDWIDTH_AIM = 0.9
MEMORY_AIM_MIB = 400.0
START_AIM_SECONDS = 5.0


def aims(report: Report) -> Iterator[Aim]:
    """Those whose figures were measured."""
    for name, scenario, precision, against, aim in _RATIOS:
        if name in report["models"]:
            ratio = Medians(report["models"][name]).ratio(f"pellucid:{precision}", scenario, against)
            if ratio is not None:
                other = f"{against} peer" if against.startswith("best") else against
                yield Aim(f"{name}, {scenario}: {precision} / {other}", ratio, aim, unit="×")
    for name, model in report["models"].items():
        yield from _model_aims(name, model)
    if "start" in report:
        what = "seconds until the bundled model is served"
        yield Aim(what, report["start"]["median_seconds"], START_AIM_SECONDS, at_most=True)


def _model_aims(name: str, model: Mapping[str, Any]) -> Iterator[Aim]:
    for each in model["summaries"]:
        if (each["engine"], each["scenario"]) == ("pellucid:bfloat16", "single") and each["share"] is not None:
            yield Aim(f"{name}, single: bfloat16 / read bandwidth", each["share"], BANDWIDTH_AIM, unit="×")
    for engine, times in model["under_load"].items():
        what = f"{name}, short prompts under load: p99 of {_name(engine)} / (2 × idle p99 + a step)"
        yield Aim(what, times["loaded_to_allowed"], 1.0, at_most=True, unit="×")
    for engine, memory in model["memory"].items():
        allowed = 1.3 * memory["weights_mib"] + memory["kv_cache_mib"] + MEMORY_AIM_MIB
        what = f"{name}, memory: {_name(engine)} / (1.3 × weights + KV cache + 400 MiB)"
        yield Aim(what, memory["resident_mib"] / allowed, 1.0, at_most=True, unit="×")


def _name(engine: str) -> str:
    """ "pellucid:int8+int8-cache" -> "int8+int8-cache"."""
    return engine.partition(":")[2]
