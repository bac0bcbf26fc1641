"""Llama: RMSNorm before, rotary positions in halves, SwiGLU, grouped-query attention (Touvron et al. 2023)."""

from __future__ import annotations

from typing import Any

from pellucid_model.config import DecoderConfig
from pellucid_model.errors import ConfigError
from pellucid_model.families.base import ConfigReader, Family


def read_llama(config: ConfigReader, **differs: Any) -> DecoderConfig:
    """The config of Llama and its kin; `differs` holds what a relative has otherwise."""
    config.expect("hidden_act", "silu")
    d_model, heads = config.take("hidden_size"), config.take("num_attention_heads")
    values: dict[str, Any] = {
        "vocab_size": config.take("vocab_size"),
        "context_length": config.take("max_position_embeddings"),
        "d_model": d_model,
        "layers": config.take("num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.take("num_key_value_heads", heads),
        "head_dim": config.take("head_dim", d_model // heads),
        "d_ff": config.take("intermediate_size"),
        "position": "rotary",
        "rotary_base": _rotary_base(config),
        "norm": "rmsnorm",
        "norm_eps": config.take("rms_norm_eps"),
        "activation": "swiglu",
        "attention_bias": config.take("attention_bias", False),
        "mlp_bias": config.take("mlp_bias", False),
        "tied_head": config.take("tie_word_embeddings", False),
    }
    return DecoderConfig(**(values | differs))


def _rotary_base(config: ConfigReader) -> float:
    """`rope_theta`, or the newer `rope_parameters` with the same inside; a scaled rotary is refused by its name."""
    base = config.take("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        parameters = dict(config.take(key, {}))
        kind = parameters.pop("rope_type", parameters.pop("type", "default"))
        if kind != "default":
            raise ConfigError(f"config {key}: rope_type = {kind!r} is not supported: must be 'default'")
        base = parameters.pop("rope_theta", base)
        if parameters:
            raise ConfigError(f"config {key}: keys that are not understood: {', '.join(sorted(parameters))}")
    return float(base)


_LAYER = "model.layers.{i}."
_BLOCK = "blocks.{i}."

LLAMA_NAMES = (
    ("model.embed_tokens.weight", "embedding.weight"),
    ("model.norm.weight", "final_norm.weight"),
    ("lm_head.weight", "head.weight"),
    (_LAYER + "input_layernorm.weight", _BLOCK + "norm1.weight"),
    (_LAYER + "post_attention_layernorm.weight", _BLOCK + "norm2.weight"),
    *(
        (f"{_LAYER}self_attn.{theirs}.{kind}", f"{_BLOCK}attention.{ours}.{kind}")
        for theirs, ours in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("o_proj", "output"))
        for kind in ("weight", "bias")
    ),
    *(
        (f"{_LAYER}mlp.{name}_proj.{kind}", f"{_BLOCK}feed_forward.{name}.{kind}")
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    ),
)

LLAMA = Family(
    model_type="llama",
    read=read_llama,
    names=LLAMA_NAMES,
    ignored=(r".*\.rotary_emb\.inv_freq",),
)
