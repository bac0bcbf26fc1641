"""A checkpoint for the custom model of examples/, with random weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from pellucid_model.tokenizers.character import CharacterTokenizer
from pellucid_testing.checkpoints import CHARACTERS

FILE = Path(__file__).parents[3] / "examples" / "custom_model" / "my_model.py"
EXAMPLE = f"{FILE}:MyTransformer"
CONFIG: dict[str, Any] = {
    "vocab_size": 4 + len(CHARACTERS),
    "context_length": 160,
    "d_model": 44,
    "heads": [3, 5, 2],
    "head_dim": 12,
    "d_ff": 100,
}


def custom_model() -> Any:
    """The example's module with random weights, as its own file makes it."""
    spec = importlib.util.spec_from_file_location("my_model", FILE)
    assert spec is not None
    assert spec.loader is not None
    python = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(python)
    module: nn.Module = python.MyTransformer(CONFIG)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return module.eval()


def custom_checkpoint(folder: Path) -> Path:
    save_file(custom_model().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    CharacterTokenizer.train([CHARACTERS]).save(folder)
    return folder
