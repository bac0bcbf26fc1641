"""Gemma 3's text models: Gemma 2 with normalised q and k, and a smaller rotary base in layers that have a window."""

from __future__ import annotations

from dataclasses import replace

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.gemma import plus_one_on_norms
from pellucid_model.families.gemma2 import SANDWICH_RULES, read_gemma2
from pellucid_model.families.llama import QUERY_KEY_NORM_RULES
from pellucid_model.families.reader import ConfigReader
from pellucid_model.families.rotary import split_by_layer_type


def _read(config: ConfigReader) -> DecoderConfig:
    config.expect("attn_logit_softcapping")  # Gemma 2 has it
    local = split_by_layer_type(config) or config.number("rope_local_base_freq", 10000.0)
    config.default(rope_theta=1000000.0)
    config.alias(_sliding_window_pattern="sliding_window_pattern")
    pattern = config.count("sliding_window_pattern", 6)
    read = read_gemma2(config, full_every=pattern)
    return replace(read, query_key_norm="head", rotary_window_base=local)


FAMILY = Family("gemma3_text", _read, plus_one_on_norms((*SANDWICH_RULES, *QUERY_KEY_NORM_RULES)), prefix="model.")
