"""Tiny random models of other projects' families, built and saved by transformers.

Sizes never coincide (heads, kv heads, head_dim, width, d_ff, vocabulary), so that shapes which agree by luck hide
nothing. Every parameter is random, biases and norms too, since what the library starts with (zeros, ones) would hide
one that is left out or misread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

CONTEXT = 128
VOCABULARY = 201
_SHARED = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDE_HEADS = {
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": CONTEXT,
}
"""A size of heads that is not width / heads, where a family allows it."""
_GROUPED = _WIDE_HEADS | {"hidden_size": 60, "head_dim": None}
_PLAIN = {key: value for key, value in _GROUPED.items() if key not in ("num_key_value_heads", "head_dim")}
_GPT = {"n_embd": 60, "n_inner": 104, "n_layer": 3, "n_head": 5, "n_positions": CONTEXT}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _WIDE_HEADS,
    "mistral": _WIDE_HEADS | {"sliding_window": 13},
    "qwen2": _WIDE_HEADS,
    "qwen3": _WIDE_HEADS,
    "gpt2": _GPT,
    "gpt_neox": _PLAIN | {"hidden_size": 72, "num_attention_heads": 3},
    "bloom": {"hidden_size": 60, "n_layer": 3, "n_head": 6, "seq_length": CONTEXT},
    "opt": {"hidden_size": 60, "ffn_dim": 104, "num_hidden_layers": 3, "num_attention_heads": 6}
    | {"max_position_embeddings": CONTEXT},
    "phi": _GROUPED | {"partial_rotary_factor": 0.4},
    "gemma": _WIDE_HEADS,
    "gptj": _GPT | {"rotary_dim": 8},
    "stablelm": _GROUPED | {"partial_rotary_factor": 0.4},
    "falcon": {"hidden_size": 60, "ffn_hidden_size": 104, "num_hidden_layers": 3, "num_attention_heads": 6}
    | {"max_position_embeddings": CONTEXT},
    "mpt": {"d_model": 60, "n_layers": 3, "n_heads": 5, "max_seq_len": CONTEXT},
    "olmo2": _GROUPED,
    "phi3": _GROUPED,
    "gemma2": _WIDE_HEADS | {"sliding_window": 13, "query_pre_attn_scalar": 30},
    "starcoder2": _GROUPED,
    "granite": _GROUPED
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 0.5},
    "cohere": _GROUPED | {"logit_scale": 0.8},
    "cohere2": _GROUPED | {"logit_scale": 0.8, "sliding_window": 13, "sliding_window_pattern": 3},
    "smollm3": _GROUPED | {"no_rope_layer_interval": 2},
    "gemma3_text": _WIDE_HEADS | {"sliding_window": 13, "query_pre_attn_scalar": 30, "sliding_window_pattern": 3},
    "olmo": _GROUPED,
    "gpt_bigcode": _GPT,
    "gpt_neo": {"hidden_size": 60, "intermediate_size": 104, "num_layers": 3, "num_heads": 5}
    | {"max_position_embeddings": CONTEXT, "window_size": 13, "attention_types": [[["global", "local", "local"], 1]]},
    "nemotron": _WIDE_HEADS,
    "glm4": _WIDE_HEADS,
    "arcee": _WIDE_HEADS,
    "olmo3": _GROUPED | {"sliding_window": 13, "num_hidden_layers": 5},
}
"""By model_type: a config whose sizes never coincide."""


def build(model_type: str, **changes: Any) -> Any:
    """A random model in evaluation mode, float32."""
    torch.set_num_threads(1)  # for such sizes more threads only wait for one another
    values = {key: value for key, value in (_SHARED | CONFIGS[model_type] | changes).items() if value is not None}
    config = transformers.AutoConfig.for_model(model_type, **values)
    classes: Any = transformers.AutoModelForCausalLM
    model = classes.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = name.endswith("weight") and (parameter.dim() == 1 or "norm" in name)
            center = 1.0 if norm and not model_type.startswith(("gemma", "nemotron")) else 0.0
            parameter.normal_(center, 0.3, generator=generator)
    return model


def save(model: Any, folder: Path, **config_changes: Any) -> Path:
    """Save as transformers does; then change values of config.json, where None takes a key away."""
    model.save_pretrained(folder)
    edit_config(folder, **config_changes)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}), encoding="utf-8")


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What transformers says, in the model's precision: tokens [n] -> [n, V]."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens[None]).logits[0]
    return logits


def some_tokens(count: int, seed: int = 0) -> torch.Tensor:
    """[count], without the special ones."""
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
