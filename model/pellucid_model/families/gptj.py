"""GPT-J: interleaved partial rotary positions, attention and feed-forward side by side behind one norm."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.alias(hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head")
    config.alias(max_position_embeddings="n_positions", n_ctx="n_positions")
    config.expect("rotary", True)
    config.expect("scale_attn_weights", True)
    config.ignore("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
    d_model = config.count("n_embd")
    heads = config.heads("n_head", None, None, d_model)
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        context_length=config.count("n_positions"),
        d_model=d_model,
        layers=config.layers("n_layer"),
        **heads,
        d_ff=config.count("n_inner", 4 * d_model),
        position="rotary",
        rotary_fraction=config.count("rotary_dim", 64) / heads["head_dim"],
        rotary_interleaved=True,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        residual="parallel_shared",
        activation=config.activation("activation_function", "gelu_new"),
        attention_bias=False,
        head_bias=True,
        tied_head=config.flag("tie_word_embeddings", False),
    )


FAMILY = Family(
    "gptj",
    _read,
    (
        Rule("wte.weight", "embedding.weight"),
        Rule("h.{i}.ln_1.{kind}", "blocks.{i}.norm1.{kind}"),
        Rule("h.{i}.attn.q_proj.weight", "blocks.{i}.attention.query.weight"),
        Rule("h.{i}.attn.k_proj.weight", "blocks.{i}.attention.key.weight"),
        Rule("h.{i}.attn.v_proj.weight", "blocks.{i}.attention.value.weight"),
        Rule("h.{i}.attn.out_proj.weight", "blocks.{i}.attention.output.weight"),
        Rule("h.{i}.mlp.fc_in.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("h.{i}.mlp.fc_out.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
        Rule("ln_f.{kind}", "final_norm.{kind}"),
        Rule("lm_head.{kind}", "head.{kind}"),
    ),
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(masked_)?bias",),  # causal masks
)
