"""OLMo 2: Llama that normalises what attention and feed-forward give, and q and k over all heads (arXiv:2501.00656)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.llama import LLAMA_RULES, read_llama
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(rms_norm_eps=1e-5)
    return read_llama(config, norm_placement="output", query_key_norm="all_heads")


FAMILY = Family(
    "olmo2",
    _read,
    amended(
        LLAMA_RULES,
        Rule("layers.{i}.post_attention_layernorm.weight", "blocks.{i}.norm1.weight"),
        Rule("layers.{i}.post_feedforward_layernorm.weight", "blocks.{i}.norm2.weight"),
        Rule("layers.{i}.self_attn.q_norm.weight", "blocks.{i}.attention.query_norm.norm.weight"),
        Rule("layers.{i}.self_attn.k_norm.weight", "blocks.{i}.attention.key_norm.norm.weight"),
    ),
    prefix="model.",
)
