"""MPT: ALiBi, and no biases at all, in norms neither (MosaicML 2023)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.changes import QKV, qkv_one_after_another
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.alias(hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads")
    config.expect("no_bias", True)
    config.expect("expansion_ratio", 4)
    config.expect("embedding_fraction", 1.0)
    config.expect("norm_type", "low_precision_layernorm", "layernorm")
    config.expect("logit_scale")
    config.ignore("learned_pos_emb", "init_device", "init_config", "tokenizer_name", "verbose")  # with ALiBi, unused
    attention = config.inner("attn_config")
    attention.expect("alibi", True)
    attention.expect("alibi_bias_max", 8)
    attention.expect("attn_type", "multihead_attention")
    for key in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        attention.expect(key, False)
    attention.expect("clip_qkv")
    attention.ignore("attn_impl")
    d_model = config.count("d_model")
    values = DecoderConfig(
        vocab_size=config.count("vocab_size"),
        context_length=config.count("max_seq_len"),
        d_model=d_model,
        layers=config.layers("n_layers"),
        **config.heads("n_heads", None, None, d_model),
        d_ff=4 * d_model,
        position="alibi",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        norm_bias=False,
        activation="gelu",
        attention_bias=False,
        attention_scale=attention.optional_number("softmax_scale"),
        mlp_bias=False,
        tied_head=config.flag("tie_word_embeddings", True),
    )
    attention.done()
    return values


FAMILY = Family(
    "mpt",
    _read,
    (
        Rule("wte.weight", "embedding.weight"),
        Rule("blocks.{i}.norm_1.weight", "blocks.{i}.norm1.weight"),
        Rule("blocks.{i}.attn.Wqkv.{kind}", QKV, qkv_one_after_another),
        Rule("blocks.{i}.attn.out_proj.weight", "blocks.{i}.attention.output.weight"),
        Rule("blocks.{i}.norm_2.weight", "blocks.{i}.norm2.weight"),
        Rule("blocks.{i}.ffn.up_proj.weight", "blocks.{i}.feed_forward.up.weight"),
        Rule("blocks.{i}.ffn.down_proj.weight", "blocks.{i}.feed_forward.down.weight"),
        Rule("norm_f.weight", "final_norm.weight"),
        Rule("lm_head.weight", "head.weight"),
    ),
    prefix="transformer.",
)
