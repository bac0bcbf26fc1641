"""The head of a GGUF file: what it says is read, and a hostile one costs neither time nor memory."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_model.errors import CheckpointError, ModelError
from pellucid_model.gguf import Header, is_gguf, read_header
from pellucid_model.gguf.loading import load_gguf
from pellucid_model.tokenizers import TokenizerError, load_tokenizer
from pellucid_testing.gguf_files import write_tensors

FAR = 2**64


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value % FAR)


def text(value: str) -> bytes:
    return u64(len(value.encode())) + value.encode()


def tensor(name: str = "t", sizes: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(sizes)) + b"".join(map(u64, sizes)) + u32(kind) + u64(offset)


def file(
    *tensors: bytes,
    keys: tuple[bytes, ...] = (),
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    tensor_count: int | None = None,
    key_count: int | None = None,
    data: int = 256,
) -> bytes:
    """A file of these parts, `data` bytes of data after the padding."""
    counts = (tensor_count, len(tensors)), (key_count, len(keys))
    head = magic + version + b"".join(u64(given if given is not None else real) for given, real in counts)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def read(folder: Path, content: bytes) -> Header:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return read_header(path)


def test_what_a_file_says(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"a": np.arange(64, dtype=np.float32).reshape(2, 32), "b": np.zeros(5, np.float16)}
    metadata = {".x": 7, ".eps": 1e-5, "flag": True, "name": "天", "list": [1, 2], "texts": ["a", "b c"]}
    path = write_tensors(tmp_path / "m.gguf", tensors, metadata)
    header = read_header(path)
    assert header.metadata == {"general.architecture": "llama", "llama.x": 7, "llama.eps": 1e-5, "flag": True} | {
        "name": "天",
        "list": [1, 2],
        "texts": ["a", "b c"],
    }
    theirs = {one.name: one for one in gguf.GGUFReader(path).tensors}
    assert [info.name for info in header.tensors] == ["a", "b"]
    for info in header.tensors:
        assert (info.offset, info.size) == (theirs[info.name].data_offset, theirs[info.name].n_bytes)
        assert info.shape == tensors[info.name].shape
    assert header.loaded_bytes == 64 * 4 + 5 * 2


def test_which_paths_are_gguf_files(tmp_path: Path) -> None:
    for name, content in {"a.gguf": b"", "b.bin": b"GGUF....", "c.bin": b"GGU", "d.txt": b"text"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "e.gguf").mkdir()
    found = [name for name in ("a.gguf", "b.bin", "c.bin", "d.txt", "e.gguf", "none.gguf") if is_gguf(tmp_path / name)]
    assert found == ["a.gguf", "b.bin"]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "shorter than its magic number"),
    "magic": (file(magic=b"GGML"), "begins with b'GGML'"),
    "html": (b"<!DOCTYPE html>" * 20, "begins with b'<!DO'"),
    "version 1": (file(version=u32(1)), "its version is 1; accepted: little-endian, version 2 or 3"),
    "big-endian": (file(version=struct.pack(">I", 3)), "it is big-endian"),
    "tensor count": (file(tensor_count=2**40), "claims 1099511627776 tensors; 65536 are the limit"),
    "more tensors than there are": (file(tensor(), tensor_count=60000), "tensor '' has 0 dimensions"),
    "key count": (file(key_count=FAR - 1), "keys; 65536 are the limit"),
    "name length": (file(keys=(u64(FAR - 8),)), "the name of a key has 18446744073709551608 bytes"),
    "text length": (file(keys=(key("k", 8, u64(2**62)),)), "key 'k' has 4611686018427387904 bytes"),
    "text beyond the file": (file(keys=(key("k", 8, u64(5000)),)), "the file ends"),
    "list of numbers": (
        file(keys=(key("k", 9, u32(10) + u64(2**61)),)),
        "elements; 4194304 in all lists are the limit",
    ),
    "list that wraps around": (
        file(keys=(key("k", 9, u32(4) + u64(2**62 + 1)),)),
        "key 'k' has 4611686018427387905 elements",
    ),
    "list of texts": (file(keys=(key("k", 9, u32(8) + u64(2**40)),)), "has 1099511627776 elements"),
    "list of lists": (file(keys=(key("k", 9, u32(9) + u64(1) + u32(9)),)), "a list of the type 9"),
    "type of a value": (file(keys=(key("k", 99, b""),)), "key 'k' has the unknown type 99"),
    "not UTF-8": (file(keys=(key("k", 8, u64(2) + b"\xff\xfe"),)), "key 'k' is not UTF-8"),
    "a key twice": (file(keys=(key("k", 0, b"\1"),) * 2), "key 'k' occurs twice"),
    "a tensor twice": (file(tensor(), tensor(offset=128)), "tensor 't' occurs twice"),
    "overlap": (file(tensor("a", (40,)), tensor("b", offset=128)), "tensors 'a' and 'b' overlap"),
    "the same place": (file(tensor("a"), tensor("b")), "tensors 'a' and 'b' overlap"),
    "offset past the end": (file(tensor(offset=4096)), "tensor 't' would end at"),
    "offset that wraps around": (file(tensor(offset=FAR - 64)), "tensor 't' would end at 18446744073709551"),
    "unaligned": (file(tensor(offset=8)), "lies at 8, which is no multiple of 32"),
    "huge dimension": (file(tensor(sizes=(2**62,))), "tensor 't' would end at"),
    "dimensions that wrap around": (file(tensor(sizes=(2**32, 2**32))), "tensor 't' would end at"),
    "no size": (file(tensor(sizes=(0, 4))), "has the sizes [0, 4]"),
    "no dimensions": (file(tensor(sizes=())), "has 0 dimensions; accepted: 1 to 4"),
    "many dimensions": (file(tensor(sizes=(1,) * 5)), "has 5 dimensions"),
    "broken block": (file(tensor(sizes=(33,), kind=8)), "Q8_0 needs the first a multiple of 32"),
    "unknown type": (file(tensor(kind=77)), "stored as type 77; accepted: F32"),
    "alignment 0": (file(keys=(key("general.alignment", 4, u32(0)),)), "general.alignment = 0"),
    "alignment as text": (file(keys=(key("general.alignment", 8, text("x")),)), "general.alignment = 'x'"),
}


@pytest.mark.parametrize(("content", "says"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_told_in_one_line_and_cost_nothing(tmp_path: Path, content: bytes, says: str) -> None:
    """B66: offsets beyond the file are read out of bounds, and claimed lengths are allocated."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path, content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert says in message
    assert str(tmp_path / "model.gguf") in message
    assert "\n" not in message
    assert peak < 1 << 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tensors = {"token_embd.weight": np.ones((9, 32), np.float32), "output_norm.weight": np.ones(32, np.float32)}
    metadata = {
        ".block_count": 1,
        ".attention.head_count": 4,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "c"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
    }
    return write_tensors(tmp_path_factory.mktemp("whole") / "m.gguf", tensors, metadata).read_bytes()


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    assert len(read(tmp_path, whole).tensors) == 2
    data = whole.index(struct.pack("<f", 1.0))
    last = whole.rindex(struct.pack("<f", 1.0)) + 4  # what follows is padding
    for length in (*range(0, data, 3), data + 1, data + 9 * 32 * 4, last - 1):
        with pytest.raises(CheckpointError):
            read(tmp_path, whole[:length])


@given(places=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_whatever_bytes_are_wrong_it_is_told(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, places: list[tuple[int, int]]
) -> None:
    content = bytearray(whole)
    for place, value in places:
        content[place] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(content)
    readers: list[Callable[[Path], object]] = [load_gguf, load_tokenizer]
    for reader in readers:
        with contextlib.suppress(ModelError, TokenizerError):
            reader(path)
