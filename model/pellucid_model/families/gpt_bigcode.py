"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key-value head and weights as nn.Linear stores them (2023)."""

from __future__ import annotations

from dataclasses import replace

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.changes import QKV, qkv_by_kv_head
from pellucid_model.families.gpt2 import FAMILY as GPT2
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(activation_function="gelu_pytorch_tanh")
    config.ignore(
        "scale_attention_softmax_in_fp32", "inference_runner", "validate_runner_input", "pre_allocate_kv_cache"
    )
    config.ignore("max_batch_size", "max_sequence_length", "pad_key_length")
    shared, kv_heads = config.flag("multi_query", True), config.optional_count("num_key_value_heads")
    read = GPT2.read(config)
    read = replace(read, kv_heads=1) if shared else read
    if kv_heads not in (None, read.kv_heads):
        config.refuse("num_key_value_heads", kv_heads, f"{read.kv_heads}, as multi_query says")
    return read


FAMILY = Family(
    "gpt_bigcode",
    _read,
    amended(
        GPT2.rules,
        Rule("h.{i}.attn.c_attn.{kind}", QKV, qkv_by_kv_head),
        Rule("h.{i}.attn.c_proj.{kind}", "blocks.{i}.attention.output.{kind}"),
        Rule("h.{i}.mlp.c_fc.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("h.{i}.mlp.c_proj.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
    ),
    prefix="transformer.",
    ignored=GPT2.ignored,
)
