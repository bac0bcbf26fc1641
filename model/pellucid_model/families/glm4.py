"""GLM-4 (0414): Llama with norms on both sides, interleaved partial rotary positions and a fused gate (2025)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.changes import GATE_UP, gate_then_up
from pellucid_model.families.llama import LLAMA_RULES, read_llama
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(partial_rotary_factor=0.5, attention_bias=True, head_dim=128, rms_norm_eps=1.5625e-07)
    return read_llama(config, rotary_interleaved=True, norm_placement="sandwich", attention_output_bias=False)


FAMILY = Family(
    "glm4",
    _read,
    amended(
        LLAMA_RULES,
        Rule("layers.{i}.post_self_attn_layernorm.weight", "blocks.{i}.norm1_after.weight"),
        Rule("layers.{i}.post_attention_layernorm.weight", "blocks.{i}.norm2.weight"),
        Rule("layers.{i}.post_mlp_layernorm.weight", "blocks.{i}.norm2_after.weight"),
        Rule("layers.{i}.mlp.gate_up_proj.{kind}", GATE_UP, gate_then_up),
    ),
    prefix="model.",
)
