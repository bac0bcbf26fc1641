"""Llama: RMSNorm before, rotary positions in halves, SwiGLU, grouped-query attention (Touvron et al. 2023)."""

from __future__ import annotations

from typing import Any

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.reader import ConfigReader
from pellucid_model.families.rotary import read_rotary


def read_llama(config: ConfigReader, **differs: Any) -> DecoderConfig:
    """The config of Llama and its kin; `differs` is what a relative has otherwise."""
    return DecoderConfig(**(llama_values(config) | differs))


def llama_values(config: ConfigReader, *, gated: bool = True) -> dict[str, Any]:
    """DecoderConfig's keys as Llama and its kin have them. A relative's other defaults are set on the reader before."""
    config.expect("rope_interleaved", False)
    config.ignore("is_llama_config", "max_sequence_length")
    d_model = config.count("hidden_size")
    heads = config.heads("num_attention_heads", "num_key_value_heads", "head_dim", d_model)
    return {
        "vocab_size": config.count("vocab_size"),
        "d_model": d_model,
        "layers": config.layers("num_hidden_layers"),
        **heads,
        "d_ff": config.count("intermediate_size"),
        **read_rotary(config, heads["head_dim"], config.count("max_position_embeddings")),
        "norm": "rmsnorm",
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "activation": config.activation("hidden_act", "silu", gated=gated),
        "attention_bias": config.flag("attention_bias", False),
        "mlp_bias": config.flag("mlp_bias", False),
        "tied_head": config.flag("tie_word_embeddings", False),
    }


def windows_by_layer(config: ConfigReader, layers: int, window: int | None, sliding: list[bool]) -> dict[str, Any]:
    """DecoderConfig's windows: `window` in the layers that `layer_types` calls sliding; without it, in `sliding`."""
    types = config.take("layer_types", None)
    if types is not None:
        names = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != layers or any(name not in names for name in types):
            accepted = f"'sliding_attention' or 'full_attention' for each of {layers} layers"
            config.refuse("layer_types", types, accepted)
        sliding = [names[name] for name in types]
    if window is None or not any(sliding):
        return {}
    return {"windows": tuple(window if slides else None for slides in sliding)}


_LAYER = "layers.{i}."
_BLOCK = "blocks.{i}."

LLAMA_RULES = (
    Rule("embed_tokens.weight", "embedding.weight"),
    Rule("norm.weight", "final_norm.weight"),
    Rule("lm_head.weight", "head.weight"),
    Rule(_LAYER + "input_layernorm.weight", _BLOCK + "norm1.weight"),
    Rule(_LAYER + "post_attention_layernorm.weight", _BLOCK + "norm2.weight"),
    Rule(_LAYER + "self_attn.q_proj.{kind}", _BLOCK + "attention.query.{kind}"),
    Rule(_LAYER + "self_attn.k_proj.{kind}", _BLOCK + "attention.key.{kind}"),
    Rule(_LAYER + "self_attn.v_proj.{kind}", _BLOCK + "attention.value.{kind}"),
    Rule(_LAYER + "self_attn.o_proj.{kind}", _BLOCK + "attention.output.{kind}"),
    Rule(_LAYER + "mlp.gate_proj.{kind}", _BLOCK + "feed_forward.gate.{kind}"),
    Rule(_LAYER + "mlp.up_proj.{kind}", _BLOCK + "feed_forward.up.{kind}"),
    Rule(_LAYER + "mlp.down_proj.{kind}", _BLOCK + "feed_forward.down.{kind}"),
)
QUERY_KEY_NORM_RULES = (
    Rule(_LAYER + "self_attn.q_norm.weight", _BLOCK + "attention.query_norm.weight"),
    Rule(_LAYER + "self_attn.k_norm.weight", _BLOCK + "attention.key_norm.weight"),
)
INVERSE_FREQUENCIES = r".*\.rotary_emb\.inv_freq"
"""Stored by old versions; a formula gives them."""

FAMILY = Family("llama", read_llama, LLAMA_RULES, prefix="model.", ignored=(INVERSE_FREQUENCIES,))
