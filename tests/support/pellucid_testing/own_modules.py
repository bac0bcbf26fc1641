"""The modules of examples/, with random weights: those that follow the contract, and those that are adopted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from pellucid_model.servable import build_module
from pellucid_model.tokenizers.character import CharacterTokenizer
from pellucid_testing.checkpoints import CHARACTERS

EXAMPLES = Path(__file__).parents[3] / "examples"
VOCAB = 4 + len(CHARACTERS)


@dataclass(frozen=True)
class Example:
    """One file of examples/: sizes never coincide."""

    file: str
    name: str
    config: dict[str, Any]

    @property
    def source(self) -> str:
        return f"{EXAMPLES / self.file}:{self.name}"

    def module(self) -> nn.Module:
        """With random weights, always the same ones, large enough that logits spread."""
        return randomized(build_module(self.source, self.config))

    def checkpoint(self, folder: Path) -> Path:
        """A folder with its weights, and a tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.module().state_dict()), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config))
        CharacterTokenizer.train([CHARACTERS]).save(folder)
        return folder


def randomized(module: nn.Module) -> nn.Module:
    """Every parameter random; norms around 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.3, generator=generator)
    return module.eval()


_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "context_length": 96, "d_model": 40, "d_ff": 72}
CONTRACT = {
    "parallel": Example(
        "custom_model/my_model.py",
        "MyTransformer",
        {**_SIZES, "context_length": 160, "d_model": 44, "heads": [3, 5, 2], "head_dim": 12, "d_ff": 100},
    ),
    "shared keys and values": Example(
        "custom_model/shared_kv.py", "SharedKV", {**_SIZES, "layers": 4, "heads": 6, "kv_heads": 2, "head_dim": 12}
    ),
    "post-LN": Example("custom_model/post_ln.py", "PostLN", {**_SIZES, "layers": 2, "heads": 5}),
    "distance bias": Example(
        "custom_model/distance_bias.py",
        "DistanceBias",
        {**_SIZES, "layers": 2, "heads": 3, "head_dim": 14, "buckets": 9, "farthest": 30},
    ),
    "talking heads": Example(
        "custom_model/talking_heads.py", "TalkingHeads", {**_SIZES, "layers": 2, "heads": 3, "head_dim": 12}
    ),
}
TEXTBOOK = Example(
    "adopted/textbook_adapter.py",
    "Served",
    {"vocab_size": VOCAB, "d_model": 36, "n_heads": 3, "n_layers": 2, "d_ff": 80, "max_len": 64},
)
NANOGPT = Example(
    "adopted/nanogpt_adapter.py",
    "Served",
    {"n_layer": 2, "n_head": 3, "n_embd": 36, "block_size": 64, "bias": True, "vocab_size": VOCAB, "dropout": 0.1},
)


def saved_checkpoint(path: Path, example: Example, prefix: str = "_orig_mod.", **beside: Any) -> Path:
    """A training script's file: the state dict of the adopted module itself, and what lies beside it."""
    module: Any = example.module()
    state = {prefix + name: tensor for name, tensor in module.module.state_dict().items()}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-3}]}
    torch.save(
        {"model": state, "optimizer": optimizer, "model_args": example.config, "iter_num": 7, **beside},
        path,
    )
    return path
