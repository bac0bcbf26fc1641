"""Reading and writing checkpoint folders: `config.json`, `model.safetensors`, and the tokenizer's files beside them.

Loading is strict: every tensor of the file is used, none of the model's is missing, every shape fits, every config
field is understood. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pellucid_model.config import ARCHITECTURE, DecoderConfig
from pellucid_model.decoder import Decoder
from pellucid_model.errors import CheckpointError, ConfigError
from pellucid_model.families import FAMILIES

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """A model in evaluation mode, as stored, on the CPU."""

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
    values = read_json(path / "config.json")
    architecture, config, rename = _recognise(path, values)
    tensors = dict(_renamed(load_tensors(path), rename))
    notices: list[str] = []
    with torch.device("meta"):
        model = Decoder(config)
    if config.tied_head:
        _settle_tied_head(tensors, notices)
    dtype = _check_tensors(path, model, tensors)
    model.load_state_dict(tensors, strict=True, assign=True)
    if config.tied_head:
        model.head.weight = model.embedding.weight
    return Checkpoint(model.eval(), config, architecture, dtype, tuple(notices))


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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or CheckpointError naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return values


def write_json(path: Path, values: object) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _recognise(path: Path, values: dict[str, Any]) -> tuple[str, DecoderConfig, Any]:
    """Whose checkpoint it is -> (architecture, our config, function from their tensor names to ours)."""
    try:
        if values.get("architecture") == ARCHITECTURE:
            return ARCHITECTURE, DecoderConfig.from_json(values), lambda name: name
        model_type = values.get("model_type")
        if model_type in FAMILIES:
            family = FAMILIES[model_type]
            return family.model_type, family.config(values), family.our_name
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from None
    known = ", ".join([f'"architecture": "{ARCHITECTURE}"', *(f'"model_type": "{name}"' for name in FAMILIES)])
    given = values.get("architecture") or values.get("model_type")
    raise ConfigError(f"{path / 'config.json'}: architecture {given!r} is not known; accepted: {known}")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file or of the shards that the index names; the two must agree."""
    if not (path / INDEX).exists():
        return _read_file(path / WEIGHTS)
    where = read_json(path / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise CheckpointError(f"{path / INDEX}: weight_map must map tensor names to file names")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(where.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{path / INDEX}: {shard!r} must be a file name in the same folder")
        tensors.update(_read_file(path / shard))
    refuse(f"{path / INDEX} names tensors that no shard holds", set(where) - set(tensors))
    refuse(f"{path / INDEX} does not name tensors of its shards", set(tensors) - set(where))
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} is missing") from None
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is broken or cut short: {error}") from None


def _renamed(tensors: dict[str, Tensor], rename: Any) -> Iterable[tuple[str, Tensor]]:
    for theirs, tensor in tensors.items():
        ours = rename(theirs)
        if ours is not None:
            yield ours, tensor


def _settle_tied_head(tensors: dict[str, Tensor], notices: list[str]) -> None:
    """A tied model may or may not store its head; the embedding counts, and a head that differs is announced."""
    embedding, head = tensors.get("embedding.weight"), tensors.get("head.weight")
    if embedding is None:
        return
    if head is not None and not torch.equal(head, embedding):
        notices.append("head and embedding are tied by config.json, but a different head is stored; it is not used")
    tensors["head.weight"] = embedding


def _check_tensors(path: Path, model: Decoder, tensors: dict[str, Tensor]) -> torch.dtype:
    """Names, shapes and types fit the model -> the widest stored type."""
    expected = model.state_dict()
    refuse(f"checkpoint {path}: tensors are missing", set(expected) - set(tensors))
    refuse(f"checkpoint {path}: tensors that the model does not have", set(tensors) - set(expected))
    for name, tensor in tensors.items():
        want, have = list(expected[name].shape), list(tensor.shape)
        if want != have:
            raise CheckpointError(f"checkpoint {path}: {name} has shape {have}, but config.json asks for {want}")
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"checkpoint {path}: {name} is stored as {tensor.dtype}; accepted: {_DTYPES}")
    return widest(tensors)


def widest(tensors: dict[str, Tensor]) -> torch.dtype:
    """The type of most bits among floating-point tensors; float32 where there is none."""
    dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)


def refuse(what: str, names: set[str]) -> None:
    """Raise CheckpointError listing the names, where there are any."""
    if names:
        listed = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise CheckpointError(f"{what}: {listed}")
