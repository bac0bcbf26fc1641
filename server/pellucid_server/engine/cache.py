"""The paged KV cache's tensors: their shape is learnt from the model, their number of blocks from the memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid_model.contract import DecoderModel
from pellucid_model.kernels.cache_layout import stored_width
from pellucid_model.kernels.huge_pages import untouched_zeros
from pellucid_model.recording import LayerCall, record_calls

_LINE = 64
"""Bytes of a cache line."""
LayerShape = LayerCall
"""What one layer keeps per token: nothing where it reads another layer's keys and values."""


class KVCache:
    """Keys and values of every layer, each [blocks, Hkv, block_size, W], so that a head's tokens lie together.

    The kernels' `cache_layout` says what W is, and what lies where in a block: the scales of an INT8 cache too, so they
    go wherever their block goes. On the CPU a block's keys and values of all layers lie side by side, so that a cache
    takes memory for the blocks that have been used. Were layers apart, each would fill up its own last huge page.
    """

    def __init__(
        self, shapes: list[LayerShape], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = shapes
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = []
        """(keys, values); a layer that reads another one's has the same tensors as that one."""
        own = [shape for shape in shapes if shape.kv_from is None]
        sizes = [(shape.kv_heads, block_size, stored_width(shape.head_dim, dtype)) for shape in own for _ in range(2)]
        if device.type == "cpu":
            self._stores, tensors = _side_by_side(blocks, sizes, dtype)
        else:
            self._stores = tensors = [torch.zeros((blocks, *size), dtype=dtype, device=device) for size in sizes]
        made = iter(tensors)
        for shape in shapes:
            self.layers.append((next(made), next(made)) if shape.kv_from is None else self.layers[shape.kv_from])

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer: one after the other, for one may read what another wrote."""
        for store in self._stores:
            for source, target in copies:
                store[target] = store[source]


def _side_by_side(
    blocks: int, sizes: Sequence[tuple[int, int, int]], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """The memory [blocks, bytes] of tensors [blocks, *size], and these as views; each begins at a cache line.

    Zeros are handed out by the system when they are touched: an empty cache takes no memory.
    """
    lengths = [math.prod(size) * dtype.itemsize for size in sizes]
    begins = list(itertools.accumulate((_whole_lines(length) for length in lengths), initial=0))
    memory = untouched_zeros((blocks, begins[-1]), torch.uint8)
    tensors = [
        memory[:, begin : begin + length].view(dtype).unflatten(1, size)
        for begin, length, size in zip(begins, lengths, sizes, strict=False)
    ]
    return [memory], tensors


def _whole_lines(length: int) -> int:
    return -(-length // _LINE) * _LINE


def bytes_per_block(shapes: list[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Cache bytes of one block over all layers, each of whose tensors takes whole cache lines."""
    kept = (shape for shape in shapes if shape.kv_from is None)
    lengths = (shape.kv_heads * block_size * stored_width(shape.head_dim, dtype) * dtype.itemsize for shape in kept)
    return sum(2 * _whole_lines(length) for length in lengths)


def native_window(shapes: list[LayerShape]) -> int:
    """The widest window where every layer has one: no row looks further back; 0 where some layer sees everything."""
    return widest_window(shapes) if all(shape.window is not None for shape in shapes) else 0


def widest_window(shapes: list[LayerShape]) -> int:
    """Of those that any layer has; 0 where none has one."""
    return max((shape.window or 0 for shape in shapes), default=0)


def default_block_size(context_length: int) -> int:
    """The largest power of two <= min(128, context / 4), at least 1: few blocks to walk, little waste at the end."""
    limit = max(1, min(128, context_length // 4))
    return 1 << (limit.bit_length() - 1)


def learn_shapes(model: DecoderModel, device: torch.device) -> list[LayerShape]:
    """The cache's shape from one recorded dry forward of a single token; nothing is declared anywhere."""
    return record_calls(model, device)
