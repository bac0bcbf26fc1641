"""Random weights in a Llama's shape, as a Hugging Face folder that every engine reads. Speed does not ask for sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4000,
    "max_position_embeddings": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "intermediate_size": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _shape(layers: int, d_model: int, heads: tuple[int, int], head_dim: int, d_ff: int, vocab: int) -> dict[str, Any]:
    return TINY | {
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "hidden_size": d_model,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "intermediate_size": d_ff,
        "tie_word_embeddings": True,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "15M": _shape(6, 288, (6, 6), 48, 768, 32000),
    "60M": _shape(12, 512, (8, 8), 64, 1536, 32000),
    "135M": _shape(30, 576, (9, 3), 64, 1536, 49152),
    "360M": _shape(32, 960, (15, 5), 64, 2560, 49152),
}
"""By name; the two largest are SmolLM2's shapes."""


def write_random_llama(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """config.json and model.safetensors, the same ones every time."""
    folder.mkdir(parents=True, exist_ok=True)
    d_model, d_ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, d_model), "model.norm": (d_model,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, d_model)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.{name}_proj": (rows, d_model)
            for name, rows in {"q": queries, "k": keys, "v": keys}.items()
        }
        shapes[f"{prefix}self_attn.o_proj"] = (d_model, queries)
        shapes |= {f"{prefix}mlp.{name}_proj": (d_ff, d_model) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj"] = (d_model, d_ff)
        shapes |= {f"{prefix}{name}_layernorm": (d_model,) for name in ("input", "post_attention")}
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.empty(shape, dtype=dtype).normal_(0, d_model**-0.5, generator=draw)
        if len(shape) == 2
        else torch.ones(shape, dtype=dtype)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(stored, indent=2))
