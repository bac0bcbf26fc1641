"""Reading and writing checkpoint folders: `config.json`, weights, and the tokenizer's files beside them.

Loading is strict: every tensor of the file is used, none of the model's is missing, every shape fits, every number is
finite, every config field is understood. Nothing that a file holds is ever run.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pellucid_model.config import ARCHITECTURE, DecoderConfig
from pellucid_model.decoder import Decoder
from pellucid_model.errors import CheckpointError, ConfigError
from pellucid_model.families import FAMILIES
from pellucid_model.families.base import Adopted, Family
from pellucid_model.weight_files import WEIGHTS, load_tensors, read_json, refuse, refuse_non_finite, widest

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WRAPPERS = re.compile(r"((_orig_mod|module)\.)+")
"""What torch.compile and data parallelism put before the names of tensors."""


@dataclass(frozen=True)
class Checkpoint:
    """A model in evaluation mode, as stored, on the CPU; weights that loading computes are float32."""

    model: Decoder
    config: DecoderConfig
    architecture: str
    dtype: torch.dtype
    """What the weights are stored in; the widest where they differ."""
    notices: tuple[str, ...]
    """What the operator should know although it loads."""


def load_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Load a folder. Raises CheckpointError or ConfigError, each one line that names file, tensor or key."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path}: no such folder")
    notices: list[str] = []
    family, config = read_config(path, notices)
    stored = {_WRAPPERS.sub("", name): tensor for name, tensor in load_tensors(path).items()}
    return assemble(path, family, config, stored, notices)


def assemble(
    path: Path, family: Family | None, config: DecoderConfig, stored: dict[str, Tensor], notices: list[str]
) -> Checkpoint:
    """A model out of its configuration and all stored tensors by their names. Raises CheckpointError."""
    model, adopted = match_tensors(path, family, config, stored, notices)
    refuse_non_finite(path, {name: stored[name] for name in adopted.origin.values()})
    model.load_state_dict(adopted.tensors, strict=True, assign=True)
    if config.tied_head:
        model.head.weight = model.embedding.weight
    architecture = ARCHITECTURE if family is None else family.model_type
    return Checkpoint(model.eval(), config, architecture, widest(stored), tuple(notices))


def match_tensors(
    path: Path, family: Family | None, config: DecoderConfig, stored: dict[str, Tensor], notices: list[str]
) -> tuple[Decoder, Adopted]:
    """The model without its weights, and the stored tensors as it wants them: all used, none missing, of its shapes.

    Reads no values, so it also answers for tensors on the meta device. Raises CheckpointError.
    """
    adopted = _adopted(path, family, stored, config)
    with torch.device("meta"):
        model = Decoder(config)
    if config.tied_head:
        _settle_tied_head(adopted, notices)
    _check_tensors(path, model, stored, adopted, family)
    return model, adopted


def read_config(path: Path, notices: list[str]) -> tuple[Family | None, DecoderConfig]:
    """Whose folder it is, None where ours, and what the model looks like. Raises CheckpointError or ConfigError."""
    file = path / "config.json"
    values = read_json(file)
    model_type = values.get("model_type")
    try:
        if values.get("architecture") == ARCHITECTURE:
            return None, DecoderConfig.from_json(values)
        if isinstance(model_type, str) and model_type in FAMILIES:
            return FAMILIES[model_type], FAMILIES[model_type].config(values, notices)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    key = "architecture" if "architecture" in values else "model_type"
    raise ConfigError(
        f'{file}: {key} = {values.get(key)!r} is not known; accepted: "architecture": "{ARCHITECTURE}", '
        f"or a model_type of {', '.join(FAMILIES)}; a module of your own is named before the checkpoint: FILE.py:CLASS "
        "(docs/add-your-model.md)"
    )


def save_checkpoint(folder: str | os.PathLike[str], model: Decoder, dtype: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors, each replaced atomically; dtype: cast to it first.

    A tied head is stored once, as the embedding.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if not (model.config.tied_head and name == "head.weight")
    }
    partial = path / f".{WEIGHTS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # the library makes it readable by its owner alone
    os.replace(partial, path / WEIGHTS)
    write_json(path / "config.json", model.config.to_json())


def write_json(path: Path, values: object) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _adopted(path: Path, family: Family | None, stored: dict[str, Tensor], config: DecoderConfig) -> Adopted:
    """Stored tensors by our names."""
    if family is None:
        return Adopted(dict(stored), {name: name for name in stored})
    try:
        return family.adopt(stored, config)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None


def _settle_tied_head(adopted: Adopted, notices: list[str]) -> None:
    """A tied model may or may not store its head; the embedding counts, and a head that differs is announced."""
    embedding, head = adopted.tensors.get("embedding.weight"), adopted.tensors.get("head.weight")
    if embedding is None:
        return
    if head is not None and not torch.equal(head, embedding):
        notices.append("head and embedding are tied by config.json, but a different head is stored; it is not used")
    adopted.tensors["head.weight"] = embedding
    adopted.origin["head.weight"] = adopted.origin["embedding.weight"]


def _check_tensors(
    path: Path, model: Decoder, stored: dict[str, Tensor], adopted: Adopted, family: Family | None
) -> None:
    """Names, shapes and types fit the model; what does not is named as the file names it."""
    expected, origin = model.state_dict(), adopted.origin
    missing = set(expected) - set(adopted.tensors) - ({"head.weight"} if model.config.tied_head else set())
    if family is not None:
        missing = {family.their_name(name, list(stored)) for name in missing}
    refuse(f"checkpoint {path}: tensors are missing", missing)
    strange = {origin[name] for name in set(adopted.tensors) - set(expected)}
    refuse(f"checkpoint {path}: tensors that the model does not have", strange)
    for name, tensor in adopted.tensors.items():
        theirs, want, have = origin[name], list(expected[name].shape), list(tensor.shape)
        if want != have:
            whole = list(stored[theirs].shape)
            made = "" if whole == have else f"{whole}, which makes {name} "
            raise CheckpointError(
                f"checkpoint {path}: {theirs} has shape {made}{have}, but config.json asks for {want}"
            )
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"checkpoint {path}: {theirs} is stored as {tensor.dtype}; accepted: {_DTYPES}")
