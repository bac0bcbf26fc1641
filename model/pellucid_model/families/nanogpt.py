"""nanoGPT's ckpt.pt: GPT-2's names, weights as nn.Linear stores them, with or without biases."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families import gpt2
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.changes import QKV, qkv_one_after_another
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    """The `model_args` of a ckpt.pt."""
    d_model, bias = config.count("n_embd"), config.flag("bias", True)
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        context_length=config.count("block_size"),
        d_model=d_model,
        layers=config.layers("n_layer"),
        **config.heads("n_head", None, None, d_model),
        d_ff=4 * d_model,
        position="learned",
        norm_bias=bias,
        activation="gelu",
        attention_bias=bias,
        mlp_bias=bias,
        tied_head=True,
    )


FAMILY = Family(
    "nanogpt",
    _read,
    amended(
        gpt2.FAMILY.rules,
        Rule("h.{i}.attn.c_attn.{kind}", QKV, qkv_one_after_another),
        Rule("h.{i}.attn.c_proj.{kind}", "blocks.{i}.attention.output.{kind}"),
        Rule("h.{i}.mlp.c_fc.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("h.{i}.mlp.c_proj.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
    ),
    prefix="transformer.",
    ignored=gpt2.FAMILY.ignored,
)
