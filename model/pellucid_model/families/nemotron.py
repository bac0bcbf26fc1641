"""Nemotron: squared relu, partial rotary positions, LayerNorm weights stored as differences from 1 (2024)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.changes import plus_one
from pellucid_model.families.llama import LLAMA_RULES, llama_values
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(hidden_act="relu2", partial_rotary_factor=0.5)
    norm = {"norm": "layernorm", "norm_eps": config.number("norm_eps", 1e-5)}
    return DecoderConfig(**(llama_values(config, gated=False) | norm))


FAMILY = Family(
    "nemotron",
    _read,
    amended(
        LLAMA_RULES,
        Rule("layers.{i}.input_layernorm.weight", "blocks.{i}.norm1.weight", plus_one),
        Rule("layers.{i}.input_layernorm.bias", "blocks.{i}.norm1.bias"),
        Rule("layers.{i}.post_attention_layernorm.weight", "blocks.{i}.norm2.weight", plus_one),
        Rule("layers.{i}.post_attention_layernorm.bias", "blocks.{i}.norm2.bias"),
        Rule("norm.weight", "final_norm.weight", plus_one),
        Rule("norm.bias", "final_norm.bias"),
    ),
    prefix="model.",
)
