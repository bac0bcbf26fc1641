"""BLOOM: ALiBi, and a norm right after the embedding (Le Scao et al. 2022, arXiv:2211.05100)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.changes import QKV, qkv_by_kv_head
from pellucid_model.families.reader import ConfigReader

TRAINED_CONTEXT = 2048


def _read(config: ConfigReader) -> DecoderConfig:
    config.alias(n_embed="hidden_size", num_hidden_layers="n_layer", num_attention_heads="n_head")
    config.expect("apply_residual_connection_post_layernorm", False)
    # Concern other implementations, or how exactly parts of a split sum are added up.
    config.ignore("slow_but_exact", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi")
    d_model = config.count("hidden_size")
    if "seq_length" not in config:
        config.notice(
            f"config.json does not say the trained context: {TRAINED_CONTEXT} tokens, as BLOOM's, are assumed"
        )
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        context_length=config.count("seq_length", TRAINED_CONTEXT),
        d_model=d_model,
        layers=config.layers("n_layer"),
        **config.heads("n_head", None, None, d_model),
        d_ff=config.count("n_inner", 4 * d_model),
        position="alibi",
        embedding_norm=True,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        tied_head=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    "bloom",
    _read,
    (
        Rule("word_embeddings.weight", "embedding.weight"),
        Rule("word_embeddings_layernorm.{kind}", "embedding_norm.{kind}"),
        Rule("h.{i}.input_layernorm.{kind}", "blocks.{i}.norm1.{kind}"),
        Rule("h.{i}.self_attention.query_key_value.{kind}", QKV, qkv_by_kv_head),
        Rule("h.{i}.self_attention.dense.{kind}", "blocks.{i}.attention.output.{kind}"),
        Rule("h.{i}.post_attention_layernorm.{kind}", "blocks.{i}.norm2.{kind}"),
        Rule("h.{i}.mlp.dense_h_to_4h.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("h.{i}.mlp.dense_4h_to_h.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
        Rule("ln_f.{kind}", "final_norm.{kind}"),
        Rule("lm_head.weight", "head.weight"),
    ),
    prefix="transformer.",
)
