"""Qwen2: Llama with biases on query, key and value (Yang et al. 2024, arXiv:2407.10671)."""

from __future__ import annotations

from typing import Any

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.llama import LLAMA_RULES, llama_values, windows_by_layer
from pellucid_model.families.reader import ConfigReader


def read_qwen(config: ConfigReader, **differs: Any) -> DecoderConfig:
    """Qwen2 and Qwen3: layers from max_window_layers on have the window, where use_sliding_window turns it on."""
    config.expect("use_mrope", False)
    values = llama_values(config) | differs
    first = config.count("max_window_layers", 28, least=0)
    window = config.optional_count("sliding_window")
    if not config.flag("use_sliding_window", False):
        window = None
    sliding = [layer >= first for layer in range(values["layers"])]
    return DecoderConfig(**values, **windows_by_layer(config, values["layers"], window, sliding))


def _read(config: ConfigReader) -> DecoderConfig:
    return read_qwen(config, attention_bias=True, attention_output_bias=False)


FAMILY = Family("qwen2", _read, LLAMA_RULES, prefix="model.")
