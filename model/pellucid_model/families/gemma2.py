"""Gemma 2: Gemma with norms on both sides, soft caps, and a window in every other layer (arXiv:2408.00118)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.gemma import gemma_values, plus_one_on_norms
from pellucid_model.families.llama import LLAMA_RULES, windows_by_layer
from pellucid_model.families.reader import ConfigReader


def read_gemma2(config: ConfigReader, full_every: int = 2) -> DecoderConfig:
    """The config of Gemma 2 and 3; without layer_types every so many layers one sees everything."""
    config.default(query_pre_attn_scalar=256, sliding_window=4096)
    values = gemma_values(config) | {
        "norm_placement": "sandwich",
        "attention_scale": config.number("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": config.optional_number("attn_logit_softcapping"),
        "logit_softcap": config.optional_number("final_logit_softcapping"),
    }
    sliding = [(layer + 1) % full_every != 0 for layer in range(values["layers"])]
    windows = windows_by_layer(config, values["layers"], config.count("sliding_window"), sliding)
    return DecoderConfig(**values, **windows)


SANDWICH_RULES = amended(
    LLAMA_RULES,
    Rule("layers.{i}.post_attention_layernorm.weight", "blocks.{i}.norm1_after.weight"),
    Rule("layers.{i}.pre_feedforward_layernorm.weight", "blocks.{i}.norm2.weight"),
    Rule("layers.{i}.post_feedforward_layernorm.weight", "blocks.{i}.norm2_after.weight"),
)

FAMILY = Family("gemma2", read_gemma2, plus_one_on_norms(SANDWICH_RULES), prefix="model.")
