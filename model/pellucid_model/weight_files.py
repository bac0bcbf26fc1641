"""A folder's weights as tensors by name: safetensors or pytorch_model.bin, in one file or in shards with an index.

In: a folder. Out: its tensors, on the CPU, mapped into memory where the format allows it. What is missing, broken or
cut short is a CheckpointError, one line that names the file. A pickle is read for tensors alone: one that asks for
anything else is refused, and nothing in it runs.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pellucid_model.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Which files hold a folder's weights."""

    files: tuple[Path, ...]
    where: dict[str, str] | None
    """Tensor name -> file name, as the index has it; None where there is no index."""


def find_weight_files(folder: Path) -> WeightFiles:
    """safetensors before pickles, shards before a single file. Raises CheckpointError where there are none."""
    for index, single in ((INDEX, WEIGHTS), (PICKLE_INDEX, PICKLE)):
        if (folder / index).exists():
            where = _weight_map(folder / index)
            return WeightFiles(tuple(folder / shard for shard in sorted(set(where.values()))), where)
        if (folder / single).exists():
            return WeightFiles((folder / single,), None)
    missing = f": {WEIGHTS} is missing" if folder.exists() else " does not exist"
    raise CheckpointError(f"checkpoint {folder}{missing}")


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder; shards and their index must agree. Raises CheckpointError."""
    found = find_weight_files(folder)
    tensors: dict[str, Tensor] = {}
    home: dict[str, str] = {}
    for file in found.files:
        for name, tensor in read_tensors(file).items():
            if name in tensors:
                raise CheckpointError(f"{file}: {name} is also in {home[name]}")
            tensors[name], home[name] = tensor, file.name
    if found.where is not None:
        index = folder / (INDEX if (folder / INDEX).exists() else PICKLE_INDEX)
        refuse(f"{index} names tensors that no shard holds", set(found.where) - set(tensors))
        refuse(f"{index} does not name tensors of its shards", set(tensors) - set(found.where))
        moved = {name for name in tensors if home[name] != found.where[name]}
        refuse(f"{index} names other shards than those that hold", moved)
    return tensors


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one file, by its name's end a pickle or safetensors. Raises CheckpointError."""
    return _read_pickle(file) if file.suffix in (".bin", ".pt", ".pth") else _read_safetensors(file)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or CheckpointError naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return values


def widest(tensors: dict[str, Tensor]) -> torch.dtype:
    """The type of most bits among floating-point tensors; float32 where there is none."""
    dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)


def refuse(what: str, names: set[str]) -> None:
    """Raise CheckpointError listing the names, where there are any."""
    if names:
        listed = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise CheckpointError(f"{what}: {listed}")


def refuse_non_finite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError naming the first tensor with a NaN or an infinity in it. Reads every number once."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor))):
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(f"checkpoint {folder}: {name} has {bad} values that are NaN or infinite")


def _weight_map(index: Path) -> dict[str, str]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    for shard in where.values():
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: {shard!r} must be a file name in the same folder")
    return where


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {file.parent}: {file.name} is missing") from None
    except PermissionError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is broken or cut short: {_one_line(error)}") from None


def read_pickle(file: Path) -> Any:
    """What torch.save wrote: tensors, numbers, strings and containers of them. Raises CheckpointError."""
    try:
        return _unpickled(file)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {file.parent}: {file.name} is missing") from None
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        what = f"asks for {wanted.group(1)}" if wanted else "is broken, or asks for more than tensors"
        raise CheckpointError(
            f"{file} {what}; only tensors are read from a pickle, and nothing in it was run"
        ) from None
    except Exception as error:  # torch raises whatever the broken part of a file leads to
        raise CheckpointError(f"{file} is broken or cut short: {_one_line(error)}") from None


def _read_pickle(file: Path) -> dict[str, Tensor]:
    values = read_pickle(file)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise CheckpointError(f"{file} must hold tensors by name")
    refuse(f"{file} holds what is no tensor", {name for name, value in values.items() if not _is_plain(value)})
    return values


def _unpickled(file: Path) -> Any:
    """Files of torch >= 1.6 are archives, whose tensors are mapped; older ones are read whole."""
    with warnings.catch_warnings(action="ignore"):  # what torch thinks of a file's age
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(file, map_location="cpu", weights_only=True)


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


def _one_line(error: Exception) -> str:
    """The first sentence of its message."""
    return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
