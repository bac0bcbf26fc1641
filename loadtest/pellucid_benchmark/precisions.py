"""The precisions that Pellucid can be measured in, by name: those of its weights, and each with an int8 KV cache."""

from __future__ import annotations

from dataclasses import dataclass

INT8_CACHE = "int8-cache"


@dataclass(frozen=True)
class Precision:
    """What is stored how."""

    name: str
    weights: str
    """Of linear layers: "float32", "bfloat16", "int8" or "int4"."""
    tables: str
    """Of embeddings: "float32" or "bfloat16"."""
    cache: str
    """Keys and values: "float32", "bfloat16" or "int8"."""

    @property
    def options(self) -> list[str]:
        """Those of `pellucid serve`."""
        quantized = self.weights in ("int8", "int4")
        return [
            *(("--quantize", self.weights) if quantized else ("--dtype", self.weights)),
            *(("--kv-dtype", "int8") if self.cache == "int8" else ()),
        ]


def _all() -> list[Precision]:
    made = []
    for weights in ("float32", "bfloat16", "int8", "int4"):
        rest = "float32" if weights == "float32" else "bfloat16"
        made += [Precision(weights, weights, rest, rest), Precision(f"{weights}+{INT8_CACHE}", weights, rest, "int8")]
    return made


PRECISIONS = {precision.name: precision for precision in _all()}
