"""From a GGUF file to a model.

In: a path. Out: a Checkpoint, as from a folder. First the head is read and checked, then it is settled that every
tensor is known, none is missing and all have the model's shapes; only then are weights read, one tensor after the
other. Quantized ones are dequantized to float32 in slices, by the format's own library; others stay as they are.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor

from pellucid_model.checkpoint import Checkpoint, assemble, match_tensors
from pellucid_model.config import DecoderConfig
from pellucid_model.errors import CheckpointError, ConfigError, ModelError
from pellucid_model.families.base import Family
from pellucid_model.gguf.architectures import ARCHITECTURES, FACTORS, STORED, find_family
from pellucid_model.gguf.header import Header, TensorInfo, read_header

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SIZES = (
    *("embedding_length", "feed_forward_length", "rope.dimension_count"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
)
"""Metadata that some tensor's shape must be as large as."""
MAX_CONTEXT = 1 << 24
SLICE_ELEMENTS = 1 << 22
"""How many elements are dequantized at once: the library needs several times their room."""


def load_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """Load a file. Raises CheckpointError or ConfigError, each one line that names file, tensor or key."""
    header = read_header(path)
    notices: list[str] = []
    with _opened(header.path) as file:
        family, config = _read_config(header, file, notices)
        infos = [info for info in header.tensors if info.name not in FACTORS]
        shapes = {info.name: torch.empty(info.shape, dtype=_dtype(info), device="meta") for info in infos}
        try:
            match_tensors(header.path, family, config, shapes, [])
        except CheckpointError as error:
            raise CheckpointError(str(error).replace("config.json", "the metadata")) from None
        tensors = {info.name: read_tensor(file, info) for info in infos}
    checkpoint = assemble(header.path, family, config, tensors, notices)
    return dataclasses.replace(checkpoint, dtype=_stored_dtype(infos))


def read_tensor(file: BinaryIO, info: TensorInfo) -> Tensor:
    """One tensor of an opened file, as `info.shape`; float32 where it is quantized."""
    file.seek(info.offset)
    if info.type.name in PLAIN:
        data = torch.empty(info.size, dtype=torch.uint8)
        _fill(file, data.numpy().data, info)
        return data.view(PLAIN[info.type.name]).view(info.shape)
    result = torch.empty(info.shape, dtype=torch.float32)
    rows = result.view(-1, info.shape[-1])
    row_bytes = info.shape[-1] // info.type.block * info.type.size
    step = max(1, SLICE_ELEMENTS // info.shape[-1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        blocks = bytearray(len(part) * row_bytes)
        _fill(file, memoryview(blocks), info)
        part.copy_(_dequantized(blocks, info, len(part)))
    return result


def _dequantized(data: bytearray, info: TensorInfo, rows: int) -> Tensor:
    """Whole rows as float32 [rows, innermost size]."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ModuleNotFoundError:
        stored = f"tensor {info.name} is stored as {info.type.name}"
        raise ModelError(f"{stored}, which needs the package gguf: pip install gguf") from None
    blocks = numpy.frombuffer(data, dtype=numpy.uint8).reshape(rows, -1)
    # Scales that are no finite numbers are found later, with the tensor's name.
    with numpy.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[info.type.name]))


def _read_config(header: Header, file: BinaryIO, notices: list[str]) -> tuple[Family, DecoderConfig]:
    architecture = header.metadata.get("general.architecture")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{header.path} is one of several parts of a model; merge them into one file first")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{header.path}: general.architecture = {architecture!r} is not known; accepted: {known}")
    family = find_family(architecture, {info.name for info in header.tensors})
    try:
        return family, family.config(_values(header, architecture, file), notices)
    except ConfigError as error:
        text = str(error).removeprefix("config ")
        raise ConfigError(f"{header.path}: metadata of the architecture {architecture}: {text}") from None


def _values(header: Header, architecture: str, file: BinaryIO) -> dict[str, Any]:
    """What an architecture is read from: its own metadata, and what the tensors tell."""
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): _same_in_all_layers(key, value)
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    infos = {info.name: info for info in header.tensors}
    _check_sizes(values, header)
    values[STORED] = frozenset(infos)
    values |= {key: read_tensor(file, infos[name]).tolist() for name, key in FACTORS.items() if name in infos}
    if "token_embd.weight" in infos:
        values["vocab_size"] = infos["token_embd.weight"].shape[0]
    return values


def _check_sizes(values: dict[str, Any], header: Header) -> None:
    """No size is larger than the tensors allow, so that a hostile one costs nothing before the shapes are compared."""
    limits = dict.fromkeys(SIZES, max((max(info.shape) for info in header.tensors), default=0))
    limits |= {"block_count": len(header.tensors), "context_length": MAX_CONTEXT}
    for key, limit in limits.items():
        value = values.get(key, 0)
        if isinstance(value, int) and value > limit:
            raise ConfigError(f"config {key} = {value}: must be at most {limit} with the tensors of this file")


def _same_in_all_layers(key: str, value: Any) -> Any:
    """One value for all layers, where the file gives each its own."""
    if not isinstance(value, list):
        return value
    if not value or any(other != value[0] for other in value):
        raise ConfigError(f"config {key} = {value!r}: must be the same in all layers")
    return value[0]


def _dtype(info: TensorInfo) -> torch.dtype:
    """The type that a tensor is read as."""
    return PLAIN.get(info.type.name, torch.float32)


def _stored_dtype(infos: list[TensorInfo]) -> torch.dtype:
    """The widest type of the matrices; the few vectors are float32 in every file.

    A quantized matrix counts as bfloat16, since it holds no more: 8 significant bits at most.
    """
    dtypes = {PLAIN.get(info.type.name, torch.bfloat16) for info in infos if len(info.shape) > 1}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def _fill(file: BinaryIO, buffer: memoryview, info: TensorInfo) -> None:
    if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
        raise CheckpointError(f"{info.name}: the file was cut short while it was read")
