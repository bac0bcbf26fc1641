"""From a checkpoint, and perhaps a file with your own module, to something the engine runs.

A checkpoint is a folder, or one file: weights saved by torch.save or safetensors, or a .gguf. Your own module is any
nn.Module that follows `contract.py`: docs/add-your-model.md. Its file is executed, because the operator named it;
nothing else ever is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from pellucid_model.checkpoint import Checkpoint, assemble, load_checkpoint
from pellucid_model.checkpoint_kind import companions, is_saved_weights
from pellucid_model.contract import SCHEMES, DecoderModel, PositionScheme
from pellucid_model.errors import CheckpointError, ModelError
from pellucid_model.families import FAMILIES
from pellucid_model.gguf import is_gguf
from pellucid_model.gguf.loading import load_gguf
from pellucid_model.saved import SavedWeights, read_saved
from pellucid_model.trial import try_out
from pellucid_model.user_module import build, find_class, load_state, without_wrappers
from pellucid_model.weight_files import load_tensors, read_json, refuse_non_finite, widest

_NANOGPT = frozenset({"n_layer", "n_head", "n_embd", "block_size"})
"""Settings by which a nanoGPT checkpoint is known."""


@dataclass(frozen=True)
class Servable:
    """A model in evaluation mode on the CPU, as stored, with what the engine must know of it."""

    module: nn.Module
    architecture: str
    vocab_size: int
    context_length: int | None
    """Trained context; None where neither module nor checkpoint says."""
    position_scheme: PositionScheme
    dtype: torch.dtype
    """What the weights are stored in; the widest where they differ."""
    custom: bool
    notices: tuple[str, ...] = ()

    @property
    def model(self) -> DecoderModel:
        return cast("DecoderModel", self.module)


def load_servable(path: Path, source: str = "") -> Servable:
    """Load a checkpoint, as `source` ("FILE.py:CLASS") where it is given. Raises ModelError, one line."""
    if source:
        return _load_custom(path, source)
    if is_gguf(path):
        checkpoint = load_gguf(path)
    else:
        checkpoint = _load_saved(path) if is_saved_weights(path) else load_checkpoint(path)
    return Servable(
        module=checkpoint.model,
        architecture=checkpoint.architecture,
        vocab_size=checkpoint.config.vocab_size,
        context_length=checkpoint.config.context_length,
        position_scheme=checkpoint.model.position_scheme,
        dtype=checkpoint.dtype,
        custom=False,
        notices=checkpoint.notices,
    )


def build_module(source: str, config: dict[str, Any]) -> nn.Module:
    """The module of "FILE.py:CLASS" with the weights it begins with, from what its config.json holds. For training."""
    return build(find_class(source), config, source)


def read_weights(path: Path) -> SavedWeights:
    """The tensors of a folder or file, and what the model is built from: in the file, or in config.json beside it."""
    if not is_saved_weights(path):
        settings = read_json(path / "config.json")
        return SavedWeights(load_tensors(path), settings)
    saved = read_saved(path)
    beside = companions(path) / "config.json"
    if saved.settings or not beside.exists():
        return saved
    return SavedWeights(saved.tensors, read_json(beside), saved.keys)


def load_module(
    path: Path, source: str, methods: tuple[str, ...] = ("forward", "logits")
) -> tuple[nn.Module, SavedWeights]:
    """The user's module with a checkpoint's weights in it, in float32 and evaluation mode, not tried out yet."""
    kind = find_class(source, methods)
    saved = read_weights(path)
    module = build(kind, saved.settings, source)
    load_state(path, module, saved.tensors)
    refuse_non_finite(path, saved.tensors)
    return module.eval(), saved


def _load_custom(path: Path, source: str) -> Servable:
    module, saved = load_module(path, source)
    scheme = getattr(module, "position_scheme", "absolute")
    if scheme not in SCHEMES:
        raise ModelError(f"{source}: position_scheme = {scheme!r}; accepted: {', '.join(SCHEMES)}")
    context = getattr(module, "context_length", None) or saved.settings.get("context_length")
    if context is not None and (type(context) is not int or context < 1):
        raise ModelError(f"{source}: context_length = {context!r}; accepted: a number of tokens, 1 or more")
    trial = try_out(module, source, cast("PositionScheme", scheme), context)
    return Servable(
        module=module,
        architecture=source.rpartition(":")[2],
        vocab_size=trial.vocab_size,
        context_length=context,
        position_scheme=trial.position_scheme,
        dtype=widest(saved.tensors),
        custom=True,
        notices=trial.notices,
    )


def _load_saved(path: Path) -> Checkpoint:
    """A file that says by itself what model it holds: nanoGPT's."""
    saved = read_weights(path)
    if not saved.settings.keys() >= _NANOGPT:
        raise CheckpointError(
            f"{path} does not say what model its {len(saved.tensors)} tensors belong to; name your own: "
            f"pellucid serve FILE.py:CLASS {path} (docs/add-your-model.md)"
        )
    family, notices = FAMILIES["nanogpt"], list[str]()
    stored = {without_wrappers(name): tensor for name, tensor in saved.tensors.items()}
    try:
        config = family.config(saved.settings, notices)
    except ModelError as error:
        raise CheckpointError(f"{path}: model_args: {error}") from None
    return assemble(path, family, config, stored, notices)
