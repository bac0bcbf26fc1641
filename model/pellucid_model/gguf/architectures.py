"""How each architecture of GGUF reads as ours: its metadata as a configuration, its tensors by our names.

The names of tensors are the same in all architectures, so one table serves them, and each architecture says what it has
otherwise. In: the metadata under the architecture's name, and what the table of tensors tells. The metadata and names
are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of llama.cpp's converters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from pellucid_model.config import DecoderConfig
from pellucid_model.contract import Rotary
from pellucid_model.families.base import Family, Rule, amended
from pellucid_model.families.changes import GATE_UP, QKV, gate_then_up, qkv_one_after_another
from pellucid_model.families.reader import ConfigReader
from pellucid_model.families.rotary import read_rotary

STORED = "stored tensors"
"""Key under which the names of all tensors stand beside the metadata."""
FACTORS = {"rope_freqs.weight": "rope_freqs", "rope_factors_short.weight": "short", "rope_factors_long.weight": "long"}
"""Tensors that belong to the configuration, and the keys under which their numbers stand beside the metadata."""


def _halves(heads: Callable[[DecoderConfig], int]) -> Any:
    """Undo the order in which the rows of q and k are kept: rotated pairs as neighbours instead of in two halves."""

    def change(tensor: Tensor, config: DecoderConfig) -> Sequence[Tensor]:
        pairs = tensor.unflatten(0, (heads(config), -1, 2))  # [H, D / 2, 2, …]
        return [pairs.transpose(1, 2).flatten(0, 2).contiguous()]

    return change


_BLOCK = "blocks.{i}."
_RULES = (
    Rule("token_embd.weight", "embedding.weight"),
    Rule("token_embd_norm.{kind}", "embedding_norm.{kind}"),
    Rule("position_embd.weight", "position.weight"),
    Rule("blk.{i}.attn_norm.{kind}", _BLOCK + "norm1.{kind}"),
    Rule("blk.{i}.attn_qkv.{kind}", QKV, qkv_one_after_another),
    Rule("blk.{i}.attn_q.{kind}", _BLOCK + "attention.query.{kind}"),
    Rule("blk.{i}.attn_k.{kind}", _BLOCK + "attention.key.{kind}"),
    Rule("blk.{i}.attn_v.{kind}", _BLOCK + "attention.value.{kind}"),
    Rule("blk.{i}.attn_q_norm.{kind}", _BLOCK + "attention.query_norm.{kind}"),
    Rule("blk.{i}.attn_k_norm.{kind}", _BLOCK + "attention.key_norm.{kind}"),
    Rule("blk.{i}.attn_output.{kind}", _BLOCK + "attention.output.{kind}"),
    Rule("blk.{i}.ffn_norm.{kind}", _BLOCK + "norm2.{kind}"),
    Rule("blk.{i}.ffn_gate.{kind}", _BLOCK + "feed_forward.gate.{kind}"),
    Rule("blk.{i}.ffn_up.{kind}", _BLOCK + "feed_forward.up.{kind}"),
    Rule("blk.{i}.ffn_down.{kind}", _BLOCK + "feed_forward.down.{kind}"),
    Rule("output_norm.{kind}", "final_norm.{kind}"),
    Rule("output.{kind}", "head.{kind}"),
)
_LLAMA_RULES = amended(
    _RULES,
    Rule("blk.{i}.attn_q.{kind}", _BLOCK + "attention.query.{kind}", _halves(lambda config: config.heads)),
    Rule("blk.{i}.attn_k.{kind}", _BLOCK + "attention.key.{kind}", _halves(lambda config: config.kv_heads)),
)
_SANDWICH_RULES = (
    *_RULES,
    Rule("blk.{i}.post_attention_norm.weight", _BLOCK + "norm1_after.weight"),
    Rule("blk.{i}.post_ffw_norm.weight", _BLOCK + "norm2_after.weight"),
)
_TWO_NORMS_RULES = amended(
    _RULES,
    Rule("blk.{i}.attn_norm.{kind}", _BLOCK + "norm2.{kind}"),  # of the feed-forward, whatever its name
    Rule("blk.{i}.attn_norm_2.{kind}", _BLOCK + "norm1.{kind}"),
)
_PHI3_RULES = amended(_RULES, Rule("blk.{i}.ffn_up.{kind}", GATE_UP, gate_then_up))


def _values(config: ConfigReader, position: str, norm: str, activation: str) -> dict[str, Any]:
    """DecoderConfig's keys as every architecture says them. Biases and a tied head are seen from what is stored."""
    stored: frozenset[str] = config.take(STORED)
    config.ignore("tensor_data_layout", "rope.scaling.finetuned")
    config.expect("expert_count", 0)
    config.expect("expert_used_count", 0)
    config.expect("attention.causal", True)
    d_model = config.count("embedding_length")
    heads = config.heads("attention.head_count", "attention.head_count_kv", "attention.key_length", d_model)
    config.expect("attention.value_length", heads["head_dim"])
    context = config.count("context_length")
    eps = "attention.layer_norm_rms_epsilon" if norm == "rmsnorm" else "attention.layer_norm_epsilon"
    return {
        "vocab_size": config.count("vocab_size"),
        "d_model": d_model,
        "layers": config.count("block_count"),
        **heads,
        "d_ff": config.count("feed_forward_length"),
        **(_rotary(config, heads["head_dim"], context) if position == "rotary" else _absolute(position, context)),
        "norm": norm,
        "norm_eps": config.number(eps),
        "norm_bias": norm == "rmsnorm" or "output_norm.bias" in stored,
        "activation": activation,
        "attention_bias": bool(stored & {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}),
        "attention_output_bias": "blk.0.attn_output.bias" in stored,
        "mlp_bias": "blk.0.ffn_down.bias" in stored,
        "head_bias": "output.bias" in stored,
        "tied_head": "output.weight" not in stored,
    }


def _absolute(position: str, context: int) -> dict[str, Any]:
    return {"position": position, "context_length": context}


def _rotary(config: ConfigReader, head_dim: int, context: int) -> dict[str, Any]:
    """The rotary keys, said as Hugging Face says them, and factors on the wavelengths where a tensor holds them."""
    turned = config.count("rope.dimension_count", head_dim)
    notices: list[str] = []
    values = {
        "rope_theta": config.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": turned / head_dim,
        "rope_scaling": _scaling(config, context),
    }
    rotary = read_rotary(ConfigReader(values, notices), head_dim, context)
    for notice in notices:
        config.notice(notice)
    factors = config.take("rope_freqs", None)
    if factors is not None:
        plain = Rotary.from_base(turned, rotary["rotary_base"]).inv_freq
        frequencies = plain.new_tensor(rotary.get("rotary_frequencies", plain.tolist()))
        if len(factors) != len(frequencies) or min(factors) <= 0:
            config.refuse("rope_freqs.weight", factors, f"{len(frequencies)} numbers above 0")
        rotary["rotary_frequencies"] = tuple((frequencies / plain.new_tensor(factors)).tolist())
    return rotary


def _scaling(config: ConfigReader, context: int) -> dict[str, Any]:
    """The scaling of rotary positions as a `rope_scaling` of Hugging Face; empty where there is none."""
    kind = config.take("rope.scaling.type", "none")
    factor = config.optional_number("rope.scaling.factor") or config.optional_number("rope.scale_linear") or 1.0
    if kind == "none" and factor != 1.0:
        kind = "linear"  # as files of before rope.scaling.type mean it
    scaling: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    original = config.optional_count("rope.scaling.original_context_length")
    attention = config.optional_number("rope.scaling.attn_factor")
    if kind in ("linear", "yarn"):
        scaling["factor"] = factor
    if kind in ("yarn", "longrope"):
        scaling["original_max_position_embeddings"] = original or context
        scaling["attention_factor"] = attention
    if kind == "yarn":
        config.expect("rope.scaling.yarn_ext_factor", 1.0)
        scaling["attention_factor"] = config.optional_number("rope.scaling.yarn_attn_factor") or attention
        scaling["beta_fast"] = config.optional_number("rope.scaling.yarn_beta_fast")
        scaling["beta_slow"] = config.optional_number("rope.scaling.yarn_beta_slow")
    if kind == "longrope":
        scaling |= {"short_factor": config.take("short"), "long_factor": config.take("long")}
    return scaling


def _llama(config: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_values(config, "rotary", "rmsnorm", "swiglu"))


def _qwen3(config: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_values(config, "rotary", "rmsnorm", "swiglu"), query_key_norm="head")


def _gemma_values(config: ConfigReader) -> dict[str, Any]:
    """Gemma's embeddings are scaled; its norms are stored with their 1 added."""
    values = _values(config, "rotary", "rmsnorm", "geglu_tanh")
    return values | {"embedding_scale": torch.tensor(values["d_model"], dtype=torch.float32).sqrt().item()}


def _gemma(config: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_gemma_values(config))


GEMMA2_27B_LAYERS = 46
"""The only size whose scores are not divided by the root of the head's size; the file does not say so."""


def _gemma2(config: ConfigReader) -> DecoderConfig:
    window = config.count("attention.sliding_window", 4096)
    attention_softcap = config.optional_number("attn_logit_softcapping")
    logit_softcap = config.optional_number("final_logit_softcapping")
    values = _gemma_values(config)
    layers, per_head = values["layers"], values["d_model"] / values["heads"]
    return DecoderConfig(
        **values,
        norm_placement="sandwich",
        attention_scale=per_head**-0.5 if layers == GEMMA2_27B_LAYERS else None,
        attention_softcap=attention_softcap,
        logit_softcap=logit_softcap,
        windows=tuple(window if layer % 2 == 0 else None for layer in range(layers)),
    )


def _phi3(config: ConfigReader) -> DecoderConfig:
    window = config.take("attention.sliding_window", 0)
    values = _values(config, "rotary", "rmsnorm", "swiglu")
    return DecoderConfig(**values, windows=(window,) * values["layers"] if window else None)


def _phi2(config: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_values(config, "rotary", "layernorm", "gelu_tanh"), residual="parallel_shared")


def _gpt2(config: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_values(config, "learned", "layernorm", "gelu_tanh"))


def _gptneox(config: ConfigReader) -> DecoderConfig:
    parallel = config.flag("use_parallel_residual", True)
    values = _values(config, "rotary", "layernorm", "gelu")
    return DecoderConfig(**values, residual="parallel" if parallel else "sequential")


def _bloom(config: ConfigReader) -> DecoderConfig:
    config.expect("attention.max_alibi_bias", 8.0)
    return DecoderConfig(**_values(config, "alibi", "layernorm", "gelu_tanh"), embedding_norm=True)


def _mpt(config: ConfigReader) -> DecoderConfig:
    config.expect("attention.max_alibi_bias", 8.0)
    config.expect("attention.clamp_kqv", 0.0)
    return DecoderConfig(**_values(config, "alibi", "layernorm", "gelu"))


def _falcon(config: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_values(config, "rotary", "layernorm", "gelu"), residual="parallel_shared")


def _falcon_two_norms(config: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_values(config, "rotary", "layernorm", "gelu"), residual="parallel")


def _starcoder2(config: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_values(config, "rotary", "layernorm", "gelu_tanh"))


def _stablelm(config: ConfigReader) -> DecoderConfig:
    parallel = config.flag("use_parallel_residual", False)
    values = _values(config, "rotary", "layernorm", "swiglu")
    return DecoderConfig(**values, residual="parallel_shared" if parallel else "sequential")


_FAMILIES = (
    Family("llama", _llama, _LLAMA_RULES),
    Family("qwen2", _llama, _RULES),
    Family("qwen3", _qwen3, _RULES),
    Family("gemma", _gemma, _RULES),
    Family("gemma2", _gemma2, _SANDWICH_RULES),
    Family("phi2", _phi2, _RULES),
    Family("phi3", _phi3, _PHI3_RULES),
    Family("gpt2", _gpt2, _RULES),
    Family("gptneox", _gptneox, _RULES),
    Family("bloom", _bloom, _RULES),
    Family("mpt", _mpt, _RULES),
    Family("falcon", _falcon, _RULES),
    Family("starcoder2", _starcoder2, _RULES),
    Family("stablelm", _stablelm, _RULES),
)
ARCHITECTURES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
"""By `general.architecture`."""
_FALCON_TWO_NORMS = Family("falcon", _falcon_two_norms, _TWO_NORMS_RULES)


def find_family(architecture: str, stored: Set[str]) -> Family:
    """The family of an architecture that is known, and of the names of all tensors."""
    two_norms = architecture == "falcon" and "blk.0.attn_norm_2.weight" in stored
    return _FALCON_TWO_NORMS if two_norms else ARCHITECTURES[architecture]
