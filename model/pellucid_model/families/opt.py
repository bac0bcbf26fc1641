"""OPT: learned positions, their table begun by two unused rows; Post-LN in its 350M (Zhang et al. 2022)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.changes import without_first_rows
from pellucid_model.families.reader import ConfigReader

POSITION_OFFSET = 2


def _read(config: ConfigReader) -> DecoderConfig:
    d_model = config.count("hidden_size")
    biases = config.flag("enable_bias", True)
    before = config.flag("do_layer_norm_before", True)
    width = config.count("word_embed_proj_dim", d_model)
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        context_length=config.count("max_position_embeddings"),
        d_model=d_model,
        layers=config.layers("num_hidden_layers"),
        **config.heads("num_attention_heads", None, None, d_model),
        d_ff=config.count("ffn_dim"),
        position="learned",
        embedding_dim=width if width != d_model else None,
        norm_placement="pre" if before else "post",
        norm_weight=config.flag("layer_norm_elementwise_affine", True),
        final_norm=not config.flag("_remove_final_layer_norm", False) and before,
        activation=config.activation("activation_function", "relu"),
        attention_bias=biases,
        mlp_bias=biases,
        tied_head=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    "opt",
    _read,
    (
        Rule("decoder.embed_tokens.weight", "embedding.weight"),
        Rule("decoder.embed_positions.weight", "position.weight", without_first_rows(POSITION_OFFSET)),
        Rule("decoder.project_in.weight", "project_in.weight"),
        Rule("decoder.project_out.weight", "project_out.weight"),
        Rule("decoder.layers.{i}.self_attn_layer_norm.{kind}", "blocks.{i}.norm1.{kind}"),
        Rule("decoder.layers.{i}.self_attn.q_proj.{kind}", "blocks.{i}.attention.query.{kind}"),
        Rule("decoder.layers.{i}.self_attn.k_proj.{kind}", "blocks.{i}.attention.key.{kind}"),
        Rule("decoder.layers.{i}.self_attn.v_proj.{kind}", "blocks.{i}.attention.value.{kind}"),
        Rule("decoder.layers.{i}.self_attn.out_proj.{kind}", "blocks.{i}.attention.output.{kind}"),
        Rule("decoder.layers.{i}.final_layer_norm.{kind}", "blocks.{i}.norm2.{kind}"),
        Rule("decoder.layers.{i}.fc1.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("decoder.layers.{i}.fc2.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
        Rule("decoder.final_layer_norm.{kind}", "final_norm.{kind}"),
        Rule("lm_head.weight", "head.weight"),
    ),
    prefix="model.",
)
