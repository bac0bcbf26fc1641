"""Falcon: one projection for q, k and v by kv head; side by side or sequential (Almazrouei et al. 2023)."""

from __future__ import annotations

from typing import Any

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.changes import QKV, qkv_by_kv_head
from pellucid_model.families.reader import ConfigReader
from pellucid_model.families.rotary import read_rotary


def _read(config: ConfigReader) -> DecoderConfig:
    config.alias(n_embed="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads")
    config.alias(n_head_kv="num_kv_heads")
    config.expect("alibi", False)  # theirs is rounded to bfloat16, so that far keys share a bias
    config.expect("apply_residual_connection_post_layernorm", False)
    d_model = config.count("hidden_size")
    heads = config.heads("num_attention_heads", "num_kv_heads", None, d_model)
    new = config.flag("new_decoder_architecture", False)
    if not new:
        heads["kv_heads"] = 1 if config.flag("multi_query", True) else heads["heads"]
    biases = config.flag("bias", False)
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        d_model=d_model,
        layers=config.layers("num_hidden_layers"),
        **heads,
        d_ff=config.count("ffn_hidden_size", 4 * d_model),
        **read_rotary(config, heads["head_dim"], config.count("max_position_embeddings", 2048)),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        residual=_residual(config, new),
        activation=config.activation("activation", "gelu"),
        attention_bias=biases,
        mlp_bias=biases,
        tied_head=config.flag("tie_word_embeddings", True),
    )


def _residual(config: ConfigReader, new: bool) -> Any:
    config.ignore("multi_query")
    norms = config.count("num_ln_in_parallel_attn", 2 if new else 1)
    if not (config.flag("parallel_attn", True) or new):
        return "sequential"
    return "parallel" if new and norms == 2 else "parallel_shared"


FAMILY = Family(
    "falcon",
    _read,
    (
        Rule("word_embeddings.weight", "embedding.weight"),
        Rule("h.{i}.input_layernorm.{kind}", "blocks.{i}.norm1.{kind}"),
        Rule("h.{i}.ln_attn.{kind}", "blocks.{i}.norm1.{kind}"),
        Rule("h.{i}.self_attention.query_key_value.{kind}", QKV, qkv_by_kv_head),
        Rule("h.{i}.self_attention.dense.{kind}", "blocks.{i}.attention.output.{kind}"),
        Rule("h.{i}.post_attention_layernorm.{kind}", "blocks.{i}.norm2.{kind}"),
        Rule("h.{i}.ln_mlp.{kind}", "blocks.{i}.norm2.{kind}"),
        Rule("h.{i}.mlp.dense_h_to_4h.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("h.{i}.mlp.dense_4h_to_h.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
        Rule("ln_f.{kind}", "final_norm.{kind}"),
        Rule("lm_head.weight", "head.weight"),
    ),
    prefix="transformer.",
)
