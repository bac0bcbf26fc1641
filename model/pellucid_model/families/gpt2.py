"""GPT-2: learned positions, LayerNorm before, weights stored transposed (Radford et al. 2019)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.changes import QKV, qkv_one_after_another_transposed, transposed
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.alias(hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head")
    config.alias(max_position_embeddings="n_positions", n_ctx="n_positions")
    config.expect("scale_attn_weights", True)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.expect("add_cross_attention", False)
    config.ignore("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
    d_model = config.count("n_embd")
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        context_length=config.count("n_positions"),
        d_model=d_model,
        layers=config.layers("n_layer"),
        **config.heads("n_head", None, None, d_model),
        d_ff=config.count("n_inner", 4 * d_model),
        position="learned",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=config.activation("activation_function", "gelu_new"),
        tied_head=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    "gpt2",
    _read,
    (
        Rule("wte.weight", "embedding.weight"),
        Rule("wpe.weight", "position.weight"),
        Rule("h.{i}.ln_1.{kind}", "blocks.{i}.norm1.{kind}"),
        Rule("h.{i}.attn.c_attn.{kind}", QKV, qkv_one_after_another_transposed),
        Rule("h.{i}.attn.c_proj.{kind}", "blocks.{i}.attention.output.{kind}", transposed),
        Rule("h.{i}.ln_2.{kind}", "blocks.{i}.norm2.{kind}"),
        Rule("h.{i}.mlp.c_fc.{kind}", "blocks.{i}.feed_forward.up.{kind}", transposed),
        Rule("h.{i}.mlp.c_proj.{kind}", "blocks.{i}.feed_forward.down.{kind}", transposed),
        Rule("ln_f.{kind}", "final_norm.{kind}"),
        Rule("lm_head.weight", "head.weight"),
    ),
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(masked_)?bias",),  # causal masks
)
