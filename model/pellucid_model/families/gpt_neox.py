"""GPT-NeoX and Pythia: partial rotary positions, attention and feed-forward side by side (Black et al. 2022)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.changes import QKV, qkv_by_kv_head
from pellucid_model.families.reader import ConfigReader
from pellucid_model.families.rotary import read_rotary


def _read(config: ConfigReader) -> DecoderConfig:
    config.alias(rotary_pct="partial_rotary_factor", rotary_emb_base="rope_theta")
    config.default(partial_rotary_factor=0.25)
    d_model = config.count("hidden_size")
    heads = config.heads("num_attention_heads", None, None, d_model)
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        d_model=d_model,
        layers=config.layers("num_hidden_layers"),
        **heads,
        d_ff=config.count("intermediate_size"),
        **read_rotary(config, heads["head_dim"], config.count("max_position_embeddings")),
        norm_eps=config.number("layer_norm_eps", 1e-5),
        residual="parallel" if config.flag("use_parallel_residual", True) else "sequential",
        activation=config.activation("hidden_act", "gelu"),
        attention_bias=config.flag("attention_bias", True),
        tied_head=config.flag("tie_word_embeddings", False),
    )


FAMILY = Family(
    "gpt_neox",
    _read,
    (
        Rule("embed_in.weight", "embedding.weight"),
        Rule("layers.{i}.input_layernorm.{kind}", "blocks.{i}.norm1.{kind}"),
        Rule("layers.{i}.attention.query_key_value.{kind}", QKV, qkv_by_kv_head),
        Rule("layers.{i}.attention.dense.{kind}", "blocks.{i}.attention.output.{kind}"),
        Rule("layers.{i}.post_attention_layernorm.{kind}", "blocks.{i}.norm2.{kind}"),
        Rule("layers.{i}.mlp.dense_h_to_4h.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("layers.{i}.mlp.dense_4h_to_h.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
        Rule("final_layer_norm.{kind}", "final_norm.{kind}"),
        Rule("lm_head.weight", "head.weight"),
        Rule("embed_out.weight", "head.weight"),
    ),
    prefix="gpt_neox.",
    ignored=(r"layers\.\d+\.attention\.(masked_)?bias", r".*\.rotary_emb\.inv_freq"),
)
