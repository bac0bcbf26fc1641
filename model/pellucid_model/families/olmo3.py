"""OLMo 3: OLMo 2 with a window in three layers of four, whose rotary positions are then not scaled (Ai2 2025)."""

from __future__ import annotations

from dataclasses import replace

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.llama import windows_by_layer
from pellucid_model.families.olmo2 import FAMILY as OLMO2
from pellucid_model.families.reader import ConfigReader
from pellucid_model.families.rotary import split_by_layer_type


def _read(config: ConfigReader) -> DecoderConfig:
    local = split_by_layer_type(config)
    config.default(rope_theta=500000.0, sliding_window=4096)
    window, layers = config.count("sliding_window"), config.layers("num_hidden_layers")
    windows = windows_by_layer(config, layers, window, [(layer + 1) % 4 != 0 for layer in range(layers)])
    config.default(num_hidden_layers=layers)
    read = OLMO2.read(config)
    return replace(read, rotary_window_base=local or read.rotary_base, **windows)


FAMILY = Family("olmo3", _read, OLMO2.rules, prefix="model.")
