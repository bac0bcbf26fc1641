"""The head of a GGUF file: metadata and the table of tensors, every length held against the file before it is used.

In: a path. Out: a `Header`, or CheckpointError, one line that names the file and what is wrong. Nothing of the
tensors' data is read, and no more memory is taken than the head itself fills, whatever lengths it claims. This module
knows neither torch nor numpy, because the server's frontend reads metadata with it.

The layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian:

    "GGUF", version u32, tensor count u64, key count u64
    keys:     name, type u32, value           a text is its length in bytes u64 and that many bytes of UTF-8
    tensors:  name, dimensions u32, sizes u64 each (innermost first), type u32, offset u64
    padding to the alignment; then the data, which offsets count from
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pellucid_model.errors import CheckpointError
from pellucid_model.gguf.types import REFUSED_TYPES, TENSOR_TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
"""Keys, and tensors, that one file may have."""
MAX_NAME_BYTES = 1 << 16
MAX_HEADER_BYTES = 1 << 26
"""The largest vocabularies take less than a third of it."""
MAX_ELEMENTS = 1 << 22
"""Of all lists together; the largest vocabularies, their kinds, scores and merges, have a third of it."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """As torch writes it: outermost first."""
    type: TensorType
    offset: int
    """From the beginning of the file, in bytes."""

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) // self.type.block * self.type.size


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]

    @property
    def loaded_bytes(self) -> int:
        """What the tensors take once they are read: quantized ones 4 bytes for each element."""
        return sum(math.prod(info.shape) * (4 if info.type.block > 1 else info.type.size) for info in self.tensors)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a GGUF file: a file that ends in .gguf, or begins as one."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check a file's head. Raises CheckpointError."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read(path, _Cursor(file, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except _BrokenError as error:
        raise CheckpointError(f"{path} is not a usable GGUF file: {error}") from None


class _BrokenError(Exception):
    """What is wrong with the file, without its name."""


class _Cursor:
    """Reads forward through the head of a file of `size` bytes."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self.position = 0
        self._end = min(size, MAX_HEADER_BYTES)
        self._elements = 0

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes. Nothing is allocated for bytes that the file does not have."""
        if count > self._end - self.position:
            limit = "the file ends" if self.size <= MAX_HEADER_BYTES else f"{MAX_HEADER_BYTES} bytes are the limit"
            raise _BrokenError(f"{what} would need {count} bytes at {self.position}, but {limit} before; cut short?")
        data = self._file.read(count)
        if len(data) != count:
            raise _BrokenError(f"{what}: the file shrank while it was read")
        self.position += count
        return data

    def count_elements(self, count: int, what: str) -> None:
        """A list of so many elements follows."""
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise _BrokenError(f"{what} has {count} elements; {MAX_ELEMENTS} in all lists are the limit")

    def number(self, code: str, what: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack(self.take(layout.size, what))[0]

    def text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = int.from_bytes(self.take(8, what), "little")
        if length > limit:
            raise _BrokenError(f"{what} has {length} bytes; {limit} are the limit")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise _BrokenError(f"{what} is not UTF-8") from None


def _read(path: Path, cursor: _Cursor) -> Header:
    if cursor.size < len(MAGIC) or (magic := cursor.take(len(MAGIC), "the magic number")) != MAGIC:
        found = "shorter than its magic number" if cursor.size < len(MAGIC) else f"it begins with {magic!r}"
        raise _BrokenError(f"{found}, not {MAGIC!r}")
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "it is big-endian" if swapped else f"its version is {version}"
        raise _BrokenError(f"{what}; accepted: little-endian, version {' or '.join(map(str, VERSIONS))}")
    tensor_count = _count(cursor, "tensors")
    metadata = _read_metadata(cursor, _count(cursor, "keys"))
    tensors = [_read_tensor(cursor) for _ in range(tensor_count)]
    return Header(path, metadata, _placed(cursor, tensors, _alignment(metadata)))


def _count(cursor: _Cursor, what: str) -> int:
    count: int = cursor.number("Q", f"the number of {what}")
    if count > MAX_ENTRIES:
        raise _BrokenError(f"it claims {count} {what}; {MAX_ENTRIES} are the limit")
    return count


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("the name of a key", MAX_NAME_BYTES)
        if key in metadata:
            raise _BrokenError(f"key {key!r} occurs twice")
        metadata[key] = _read_value(cursor, cursor.number("I", f"the type of {key!r}"), f"key {key!r}")
    return metadata


def _read_value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    if kind not in _SCALARS:
        raise _BrokenError(f"{what} has the unknown type {kind}")
    value = cursor.number(_SCALARS[kind], what)
    return _shortest(value) if _SCALARS[kind] == "f" else value


def _read_array(cursor: _Cursor, what: str) -> list[Any]:
    kind, count = cursor.number("I", what), cursor.number("Q", what)
    cursor.count_elements(count, what)
    if kind == _STRING:
        return [cursor.text(what) for _ in range(count)]
    if kind not in _SCALARS:
        raise _BrokenError(f"{what} is a list of the type {kind}; accepted: numbers and texts")
    data = cursor.take(count * struct.calcsize(_SCALARS[kind]), what)
    return list(struct.unpack(f"<{count}{_SCALARS[kind]}", data))


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    """One entry of the table, its offset still counted from the data's beginning."""
    name = cursor.text("the name of a tensor", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    dimensions = cursor.number("I", what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise _BrokenError(f"{what} has {dimensions} dimensions; accepted: 1 to {MAX_DIMENSIONS}")
    sizes = [cursor.number("Q", what) for _ in range(dimensions)]
    number, offset = cursor.number("I", what), cursor.number("Q", what)
    if number not in TENSOR_TYPES:
        accepted = ", ".join(known.name for known in TENSOR_TYPES.values())
        raise _BrokenError(f"{what} is stored as {REFUSED_TYPES.get(number, f'type {number}')}; accepted: {accepted}")
    stored = TENSOR_TYPES[number]
    if min(sizes) < 1 or sizes[0] % stored.block:
        raise _BrokenError(f"{what} has the sizes {sizes}; {stored.name} needs the first a multiple of {stored.block}")
    return TensorInfo(name, tuple(reversed(sizes)), stored, offset)


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise _BrokenError(f"general.alignment = {alignment!r}; accepted: a multiple of 8")
    return alignment


def _placed(cursor: _Cursor, tensors: list[TensorInfo], alignment: int) -> tuple[TensorInfo, ...]:
    """The tensors with offsets from the file's beginning: aligned, inside the file, none over another."""
    begin = -(-cursor.position // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    for tensor in tensors:
        if tensor.name in placed:
            raise _BrokenError(f"tensor {tensor.name!r} occurs twice")
        if tensor.offset % alignment:
            raise _BrokenError(f"tensor {tensor.name!r} lies at {tensor.offset}, which is no multiple of {alignment}")
        end = begin + tensor.offset + tensor.size
        if end > cursor.size:
            raise _BrokenError(f"tensor {tensor.name!r} would end at {end}, but the file at {cursor.size}; cut short?")
        placed[tensor.name] = TensorInfo(tensor.name, tensor.shape, tensor.type, begin + tensor.offset)
    in_order = sorted(placed.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(in_order):
        if before.offset + before.size > after.offset:
            raise _BrokenError(f"tensors {before.name!r} and {after.name!r} overlap")
    return tuple(placed.values())


def _shortest(value: float) -> float:
    """A float32 as the decimal number it was written from: 1e-05 instead of 9.999999747378752e-06."""
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        except OverflowError:  # rounded up beyond the largest float32
            continue
    return value
