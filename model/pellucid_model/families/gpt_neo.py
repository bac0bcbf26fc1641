"""GPT-Neo: GPT-2 with a window in every other layer and scores that are not scaled (Black et al. 2021)."""

from __future__ import annotations

from typing import Any

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.gpt2 import FAMILY as GPT2
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.alias(num_hidden_layers="num_layers", num_attention_heads="num_heads")
    config.ignore("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
    d_model, layers = config.count("hidden_size"), config.layers("num_layers")
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        context_length=config.count("max_position_embeddings"),
        d_model=d_model,
        layers=layers,
        **config.heads("num_heads", None, None, d_model),
        d_ff=config.count("intermediate_size", 4 * d_model),
        position="learned",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=config.activation("activation_function", "gelu_new"),
        attention_bias=False,
        attention_output_bias=True,
        attention_scale=1.0,
        tied_head=config.flag("tie_word_embeddings", True),
        windows=_windows(config, layers),
    )


def _windows(config: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """`attention_types` is [[[kinds], times], …]; `attention_layers` says the same, layer by layer."""
    given = config.take("attention_types", [[["global", "local"], layers // 2]])
    window, config_layers = config.count("window_size", 256), config.take("attention_layers", None)
    kinds: list[Any] = []
    try:
        for group, times in given:
            kinds += min(times, layers + 1) * list(group)
    except (TypeError, ValueError):
        kinds = []
    if (
        len(kinds) != layers
        or any(kind not in ("global", "local") for kind in kinds)
        or config_layers not in (None, kinds)
    ):
        config.refuse("attention_types", given, f"[[[kinds], times], …] with 'global' or 'local' for {layers} layers")
    return tuple(window if kind == "local" else None for kind in kinds)


FAMILY = Family(
    "gpt_neo",
    _read,
    amended(
        GPT2.rules,
        Rule("h.{i}.attn.attention.q_proj.weight", "blocks.{i}.attention.query.weight"),
        Rule("h.{i}.attn.attention.k_proj.weight", "blocks.{i}.attention.key.weight"),
        Rule("h.{i}.attn.attention.v_proj.weight", "blocks.{i}.attention.value.weight"),
        Rule("h.{i}.attn.attention.out_proj.{kind}", "blocks.{i}.attention.output.{kind}"),
        Rule("h.{i}.mlp.c_fc.{kind}", "blocks.{i}.feed_forward.up.{kind}"),
        Rule("h.{i}.mlp.c_proj.{kind}", "blocks.{i}.feed_forward.down.{kind}"),
    ),
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.attention\.(masked_)?bias",),  # causal masks
)
