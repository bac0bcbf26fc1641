"""Where weights and the KV cache lie."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from pellucid_model.kernels.huge_pages import WeightMemory, untouched_zeros

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_copies_are_apart_and_begin_at_cache_lines() -> None:
    memory = WeightMemory()
    sizes = (1, 63, 64, 65, 1000, 40 << 20, 3)
    copies = [memory.copy(torch.full((size,), i, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    for i, (size, copy) in enumerate(zip(sizes, copies, strict=True)):
        assert copy.shape == (size,)
        assert copy.data_ptr() % 64 == 0
        assert (copy == i).all()


def test_shape_is_kept() -> None:
    x = torch.arange(60, dtype=torch.uint8).view(3, 20).T
    copy = WeightMemory().copy(x)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)


def test_zeros_take_no_room_until_they_are_touched() -> None:
    zeros = untouched_zeros((64, 2**18), torch.float32)
    mapping = _mapping(zeros.data_ptr())
    assert mapping is not None
    assert _kilobytes(mapping, "Size") >= 64 * 1024
    assert _kilobytes(mapping, "Rss") == 0
    zeros[3, 5] = 1
    assert zeros.sum() == 1


def test_memory_is_given_back() -> None:
    copy = WeightMemory().copy(torch.ones(8 << 20, dtype=torch.uint8))
    address = copy.data_ptr()
    assert _mapping(address) is not None
    del copy
    gc.collect()
    assert _mapping(address) is None


def test_pages_are_huge() -> None:
    if not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text():
        pytest.skip("this system has no huge pages")
    copy = WeightMemory().copy(torch.ones(8 << 20, dtype=torch.uint8))
    mapping = _mapping(copy.data_ptr())
    assert mapping is not None
    assert "VmFlags:" in mapping
    assert " hg" in mapping[mapping.index("VmFlags:") :]  # asked for; whether it gets them is up to the system


def _kilobytes(mapping: str, name: str) -> int:
    return next(int(line.split()[1]) for line in mapping.splitlines() if line.startswith(name + ":"))


def _mapping(address: int) -> str | None:
    """What Linux says of the mapping that holds an address."""
    found: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2 and all(part and set(part) <= set("0123456789abcdef") for part in bounds):
            if found:
                break
            if int(bounds[0], 16) <= address < int(bounds[1], 16):
                found.append(line)
        elif found:
            found.append(line)
    return "\n".join(found) or None
