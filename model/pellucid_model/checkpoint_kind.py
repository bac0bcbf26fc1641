"""What a checkpoint's path names: a folder, or a single file of weights. Knows no torch, for the frontend uses it."""

from __future__ import annotations

from pathlib import Path

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
SAVED = (*PICKLED, ".safetensors")


def is_saved_weights(path: Path) -> bool:
    """Whether a checkpoint is one file written by torch.save or safetensors, by its name."""
    return path.suffix in SAVED and not path.is_dir()


def companions(path: Path) -> Path:
    """Where a checkpoint's other files lie (config.json, tokenizer.json …): the folder itself, or that of the file."""
    return path.parent if is_saved_weights(path) else path
