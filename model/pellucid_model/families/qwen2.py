"""Qwen2: Llama with biases on query, key and value (Yang et al. 2024, arXiv:2407.10671)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import ConfigReader, Family
from pellucid_model.families.llama import LLAMA_NAMES, read_llama


def _read(config: ConfigReader) -> DecoderConfig:
    config.expect("use_sliding_window", False)
    # Without use_sliding_window these say nothing.
    config.take("sliding_window", None)
    config.take("max_window_layers", None)
    config.take("layer_types", None)
    return read_llama(config, attention_bias=True, attention_output_bias=False)


QWEN2 = Family(model_type="qwen2", read=_read, names=LLAMA_NAMES)
