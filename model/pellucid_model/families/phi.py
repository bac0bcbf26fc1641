"""Phi-1, 1.5 and 2: attention and feed-forward side by side behind one norm (Gunasekar et al. 2023)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.reader import ConfigReader
from pellucid_model.families.rotary import read_rotary


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(partial_rotary_factor=0.5)
    d_model = config.count("hidden_size")
    heads = config.heads("num_attention_heads", "num_key_value_heads", None, d_model)
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        d_model=d_model,
        layers=config.layers("num_hidden_layers"),
        **heads,
        d_ff=config.count("intermediate_size"),
        **read_rotary(config, heads["head_dim"], config.count("max_position_embeddings")),
        norm_eps=config.number("layer_norm_eps", 1e-5),
        residual="parallel_shared",
        query_key_norm="head" if config.flag("qk_layernorm", False) else None,
        activation=config.activation("hidden_act", "gelu_new"),
        head_bias=True,
        tied_head=config.flag("tie_word_embeddings", False),
    )


FAMILY = Family(
    "phi",
    _read,
    (
        Rule("embed_tokens.weight", "embedding.weight"),
        Rule("layers.{i}.input_layernorm.{kind}", "blocks.{i}.norm1.{kind}"),
        Rule("layers.{i}.self_attn.q_proj.{kind}", "blocks.{i}.attention.query.{kind}"),
        Rule("layers.{i}.self_attn.k_proj.{kind}", "blocks.{i}.attention.key.{kind}"),
        Rule("layers.{i}.self_attn.v_proj.{kind}", "blocks.{i}.attention.value.{kind}"),
        Rule("layers.{i}.self_attn.dense.{kind}", "blocks.{i}.attention.output.{kind}"),
        Rule("layers.{i}.self_attn.q_layernorm.{kind}", "blocks.{i}.attention.query_norm.{kind}"),
        Rule("layers.{i}.self_attn.k_layernorm.{kind}", "blocks.{i}.attention.key_norm.{kind}"),
        Rule("layers.{i}.mlp.fc1.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("layers.{i}.mlp.fc2.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
        Rule("final_layernorm.{kind}", "final_norm.{kind}"),
        Rule("lm_head.{kind}", "head.{kind}"),
    ),
    prefix="model.",
)
