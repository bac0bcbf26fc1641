"""Where the model of a run comes from, and how its weights are written down.

In: a `ModelSource`. Out: a `TrainableModel`: the configurable decoder of the recipe, a checkpoint to go on from, or a
module of the user's own, new or with weights.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pellucid_model.checkpoint import save_checkpoint, write_json
from pellucid_model.decoder import Decoder
from pellucid_model.servable import build_module, load_servable, read_weights
from pellucid_model.training.errors import TrainingError
from pellucid_model.training.recipe import Recipe
from pellucid_model.weight_files import WEIGHTS


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """All None: the decoder that the recipe describes, with new weights."""

    checkpoint: str | None = None
    """Absolute path of the folder whose weights training starts from."""
    module: str | None = None
    """FILE.py:CLASS of a module of one's own, the file's path absolute."""
    config: Mapping[str, Any] | None = None
    """What a module without weights is built from, besides vocab_size and context_length."""

    @property
    def is_recipe(self) -> bool:
        return self.checkpoint is None and self.module is None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TrainableModel:
    """A module in float32 with what its config.json holds."""

    module: nn.Module
    config: Mapping[str, Any]
    vocab_size: int | None
    """Entries of its output layer; None: not known before it runs."""
    context_length: int | None
    """Longest row it can read; None: not known."""

    def write(self, folder: Path, dtype: torch.dtype) -> None:
        """config.json and model.safetensors. config.json is written last: where it stands, the rest is complete."""
        if isinstance(self.module, Decoder):
            save_checkpoint(folder, self.module, dtype)
        else:
            _write_tensors(folder / WEIGHTS, self.module, dtype)
            write_json(folder / "config.json", dict(self.config))


def make_model(source: ModelSource, recipe: Recipe, vocab_size: int) -> TrainableModel:
    """The model of a run, before its first step. Raises ModelError."""
    if source.checkpoint is not None:
        return load_model(Path(source.checkpoint), source.module, recipe)
    if source.module is not None:
        config = {**(source.config or {}), "vocab_size": vocab_size}
        config.setdefault("context_length", recipe.context_length)
        module = build_module(source.module, config)
        return TrainableModel(module.float(), config, vocab_size, config["context_length"])
    decoder = Decoder(recipe.model_config(vocab_size))
    decoder.initialize(recipe.init_std)
    return TrainableModel(decoder, decoder.config.to_json(), vocab_size, recipe.context_length)


def load_model(folder: Path, module: str | None, recipe: Recipe) -> TrainableModel:
    """The model of a checkpoint, ready to be trained: in float32, and with the recipe's dropout."""
    servable = load_servable(folder, module or "")
    trained = servable.module.float()
    if not isinstance(trained, Decoder) and module is None:
        raise TrainingError(f"{folder}: {servable.architecture} cannot be trained as it is; name its --module")
    for parameter in trained.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    for part in trained.modules():
        if isinstance(part, nn.Dropout):
            part.p = recipe.dropout
    config = trained.config.to_json() if isinstance(trained, Decoder) else read_weights(folder).settings
    return TrainableModel(trained, config, servable.vocab_size, servable.context_length)


def _write_tensors(path: Path, module: nn.Module, dtype: torch.dtype) -> None:
    """Every tensor once, a tied one under its first name; whole or not at all."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept = dtype if tensor.is_floating_point() else tensor.dtype
            tensors[name] = tensor.detach().to(device="cpu", dtype=kept).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # the library makes it readable by its owner alone
    os.replace(partial, path)
