"""StarCoder2: rotary positions and grouped queries with LayerNorm, biases and a plain feed-forward (2024)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.llama import LLAMA_RULES
from pellucid_model.families.reader import ConfigReader
from pellucid_model.families.rotary import read_rotary


def _read(config: ConfigReader) -> DecoderConfig:
    config.expect("norm_type", "layer_norm")
    config.expect("mlp_type", "default")
    config.expect("scale_attn_weights", True)
    config.ignore("scale_attention_softmax_in_fp32")
    d_model = config.count("hidden_size")
    layers = config.layers("num_hidden_layers")
    heads = config.heads("num_attention_heads", "num_key_value_heads", None, d_model)
    window = config.optional_count("sliding_window")
    biases = config.flag("use_bias", True)
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        d_model=d_model,
        layers=layers,
        **heads,
        d_ff=config.count("intermediate_size"),
        **read_rotary(config, heads["head_dim"], config.count("max_position_embeddings")),
        norm_eps=config.number("norm_epsilon", 1e-5),
        activation=config.activation("hidden_act", "gelu_pytorch_tanh"),
        attention_bias=biases,
        mlp_bias=biases,
        tied_head=config.flag("tie_word_embeddings", True),
        windows=(window,) * layers if window else None,
    )


FAMILY = Family(
    "starcoder2",
    _read,
    amended(
        LLAMA_RULES,
        Rule("layers.{i}.input_layernorm.{kind}", "blocks.{i}.norm1.{kind}"),
        Rule("layers.{i}.post_attention_layernorm.{kind}", "blocks.{i}.norm2.{kind}"),
        Rule("layers.{i}.mlp.c_fc.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("layers.{i}.mlp.c_proj.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
        Rule("norm.{kind}", "final_norm.{kind}"),
    ),
    prefix="model.",
)
