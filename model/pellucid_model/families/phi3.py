"""Phi-3 and Phi-4: Llama with q, k, v in one projection and gate, up in another (Abdin et al. 2024)."""

from __future__ import annotations

from dataclasses import replace

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.changes import GATE_UP, QKV, gate_then_up, qkv_one_after_another
from pellucid_model.families.llama import LLAMA_RULES, read_llama
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(rms_norm_eps=1e-5)
    config.expect("full_attn_mod", 1)
    config.expect("interpolate_factor", 1)
    config.expect("lm_head_bias", False)
    window = config.optional_count("sliding_window")
    read = read_llama(config)
    config.ignore("original_max_position_embeddings")  # where nothing is scaled
    return replace(read, windows=(window,) * read.layers) if window else read


FAMILY = Family(
    "phi3",
    _read,
    amended(
        LLAMA_RULES,
        Rule("layers.{i}.self_attn.qkv_proj.{kind}", QKV, qkv_one_after_another),
        Rule("layers.{i}.mlp.gate_up_proj.{kind}", GATE_UP, gate_then_up),
    ),
    prefix="model.",
)
