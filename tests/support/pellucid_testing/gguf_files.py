"""Small GGUF files, written by the format's own library as llama.cpp's converters write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

ARCHITECTURES: dict[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "phi": gguf.MODEL_ARCH.PHI2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "bloom": gguf.MODEL_ARCH.BLOOM,
    "mpt": gguf.MODEL_ARCH.MPT,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
}
"""By transformers' model_type."""
_FUSED = ("bloom", "gpt_neox", "falcon")
"""Whose q, k and v lie head by head at Hugging Face and one after another in GGUF."""


def write_model(path: Path, model: Any, add: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    """A model of transformers as a float32 file without tokenizer; `add` may add to it before it is written."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    heads = _add_shape(writer, config)
    names = gguf.get_tensor_name_map(architecture, _first(config, "num_hidden_layers", "n_layer", "n_layers"))
    bloom = config.model_type == "bloom"
    tied = getattr(config, "tie_word_embeddings", False)
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        ours = names.get_name(name.removeprefix("transformer.") if bloom else name, try_suffixes=(".weight", ".bias"))
        if ours is None:
            raise AssertionError(f"no name for {name}")
        writer.add_tensor(ours, np.ascontiguousarray(_as_stored(config.model_type, name, tensor.float(), *heads)))
    add(writer)
    return _finished(writer, path)


def _finished(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tensors(
    path: Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    stored: gguf.GGMLQuantizationType | None = None,
    architecture: str = "llama",
) -> Path:
    """A file with these tensors, those of bytes being blocks of the type `stored`, and this metadata.

    A key that begins with a dot follows the architecture's name.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, architecture + key if key.startswith(".") else key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=stored if tensor.dtype == np.uint8 else None)
    return _finished(writer, path)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A metadata entry of the type that its value has."""
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def _first(config: Any, *keys: str) -> Any:
    return next(value for key in keys if (value := getattr(config, key, None)) is not None)


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> tuple[int, int, int]:
    """The metadata -> query heads, kv heads, size of a head."""
    kind = config.model_type
    d_model = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _first(config, "num_key_value_heads", "num_kv_heads") if kind in _GROUPED else heads
    kv_heads = 1 if kind == "falcon" and not config.new_decoder_architecture else kv_heads
    head_dim = getattr(config, "head_dim", None) or d_model // heads
    writer.add_block_count(_first(config, "num_hidden_layers", "n_layer", "n_layers"))
    writer.add_context_length(_first(config, "max_position_embeddings", "n_positions", "seq_length", "max_seq_len"))
    writer.add_embedding_length(d_model)
    inner = [getattr(config, key, None) for key in ("intermediate_size", "ffn_hidden_size", "n_inner")]
    writer.add_feed_forward_length(next((size for size in inner if size is not None), 4 * d_model))
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(_first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"))
    _add_positions(writer, config, head_dim)
    if kind in ("gpt_neox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if kind in ("bloom", "mpt"):
        writer.add_max_alibi_bias(8.0)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind in ("gemma2", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    return heads, kv_heads, head_dim


_GROUPED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"),
    *("phi", "phi3", "falcon", "starcoder2", "stablelm"),
)


def _add_positions(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rotary = getattr(config, "rope_parameters", None)
    if not rotary:
        return
    writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rotary.get("partial_rotary_factor", 1.0)))
    if rotary["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotary["rope_type"]))
        writer.add_rope_scaling_factor(rotary["factor"])
    if rotary["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])


def _as_stored(kind: str, name: str, tensor: Tensor, heads: int, kv_heads: int, head_dim: int) -> Any:
    """What the converters do to a tensor."""
    if kind in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
        count = heads if "q_proj" in name else kv_heads
        tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
    if kind in _FUSED and "query_key_value" in name:
        groups = tensor.unflatten(0, (kv_heads, heads // kv_heads + 2, head_dim))
        tensor = torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])
    if kind == "gpt2" and tensor.dim() == 2 and ("c_" in name):
        tensor = tensor.t()
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + 1
    return tensor.numpy()
