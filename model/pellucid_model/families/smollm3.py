"""SmolLM3: Llama in which every fourth layer has no positions (Hugging Face 2025)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.llama import LLAMA_RULES, llama_values, windows_by_layer
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(rope_theta=2000000.0, tie_word_embeddings=True)
    values = llama_values(config)
    layers = values["layers"]
    config.ignore("max_window_layers")
    interval = config.count("no_rope_layer_interval", 4)
    rotates = config.take("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(layers)])
    if not isinstance(rotates, list) or len(rotates) != layers or any(one not in (0, 1) for one in rotates):
        config.refuse("no_rope_layers", rotates, f"1 or 0 for each of {layers} layers: whether it rotates")
    window = config.optional_count("sliding_window")
    if not config.flag("use_sliding_window", False):
        window = None
    windows = windows_by_layer(config, layers, window, [not one for one in rotates])
    return DecoderConfig(**values, rotary_layers=tuple(map(bool, rotates)), **windows)


FAMILY = Family("smollm3", _read, LLAMA_RULES, prefix="model.")
