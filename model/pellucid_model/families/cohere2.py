"""Command R7B and A: Command R with a window and rotary positions in three layers of four, neither in the fourth."""

from __future__ import annotations

from dataclasses import replace

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.cohere import FAMILY as COHERE
from pellucid_model.families.llama import LLAMA_RULES, windows_by_layer
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(rope_theta=10000.0, sliding_window=4096)
    config.expect("position_embedding_type", "rope_gptj")
    config.expect("order_of_interleaved_layers", "local_attn_first")
    for key in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        config.expect(key, True)
    config.expect("rotary_pct", 1.0)
    config.ignore("use_parallel_embedding", "layer_switch")
    pattern = config.count("sliding_window_pattern", 4)
    window = config.count("sliding_window")
    layers = config.layers("num_hidden_layers")
    sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    windows = windows_by_layer(config, layers, window, sliding).get("windows", (None,) * layers)
    config.default(num_hidden_layers=layers)
    read = COHERE.read(config)
    return replace(read, windows=windows, rotary_layers=tuple(one is not None for one in windows))


FAMILY = Family("cohere2", _read, LLAMA_RULES, prefix="model.")
