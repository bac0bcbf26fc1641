"""Memory in huge pages, for what every step goes through: weights and the KV cache. Small pages would cost look-ups.

Memory comes straight from the system, which is asked for huge pages (madvise) where there are several; where it has
none, pages are ordinary ones. Memory holds zeros, takes no room until it is touched, and is given back when the last
tensor in it is gone.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 2**20
_SEVERAL = 4 * _HUGE_PAGE  # so that the untouched rest of the last one is little
_REGION = 256 * 2**20  # every one ends in a huge page that is not full
_LINE = 64


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU. (torch.zeros would write them, and thereby take the room.)"""
    return _map(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class WeightMemory:
    """Lays tensors one after the other into regions of many huge pages."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, x: Tensor) -> Tensor:
        """A contiguous copy of x uint8, at the beginning of a cache line."""
        size = -(-x.numel() // _LINE) * _LINE
        if size > self._free.numel():
            self._free = _map(max(size, _REGION))
        taken, self._free = self._free[: x.numel()], self._free[size:]
        return taken.view(x.shape).copy_(x)


def _map(size: int) -> Tensor:
    """uint8 [size], from the beginning of a huge page."""
    whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    mapping = mmap.mmap(-1, whole + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _SEVERAL and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping
    return memory[-memory.data_ptr() % _HUGE_PAGE :][:size]
