"""The paged KV cache's tensors: their shape is learnt from the model, their number of blocks from the memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid_model.contract import DecoderModel
from pellucid_model.kernels.cache_layout import stored_width
from pellucid_model.kernels.huge_pages import untouched_zeros
from pellucid_model.recording import LayerCall, record_calls

LayerShape = LayerCall
"""What one layer keeps per token: nothing where it reads another layer's keys and values."""


class KVCache:
    """Keys and values of every layer, each [blocks, Hkv, block_size, W], so that a head's tokens lie together.

    The kernels' `cache_layout` says what W is, and what lies where in a block: the scales of an INT8 cache too, so they
    go wherever their block goes.
    """

    def __init__(
        self, shapes: list[LayerShape], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = shapes
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = []
        """(keys, values); a layer that reads another one's has the same tensors as that one."""
        for shape in shapes:
            if shape.kv_from is not None:
                self.layers.append(self.layers[shape.kv_from])
                continue
            # On the CPU zeros are handed out by the system when they are touched: an empty cache takes no memory.
            size = (blocks, shape.kv_heads, block_size, stored_width(shape.head_dim, dtype))
            on_cpu = device.type == "cpu"
            keys, values = (
                untouched_zeros(size, dtype) if on_cpu else torch.zeros(size, dtype=dtype, device=device)
                for _ in range(2)
            )
            self.layers.append((keys, values))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer: one after the other, for one may read what another wrote."""
        stores = {id(keys): (keys, values) for keys, values in self.layers}
        for store in itertools.chain.from_iterable(stores.values()):
            for source, target in copies:
                store[target] = store[source]


def bytes_per_token(shapes: list[LayerShape], dtype: torch.dtype) -> int:
    """Cache bytes of one token over all layers."""
    kept = (shape for shape in shapes if shape.kv_from is None)
    return sum(2 * shape.kv_heads * stored_width(shape.head_dim, dtype) * dtype.itemsize for shape in kept)


def native_window(shapes: list[LayerShape]) -> int:
    """The widest window where every layer has one: no row looks further back; 0 where some layer sees everything."""
    windows = [shape.window for shape in shapes if shape.window is not None]
    return max(windows) if len(windows) == len(shapes) else 0


def default_block_size(context_length: int) -> int:
    """The largest power of two <= min(128, context / 4), at least 1: few blocks to walk, little waste at the end."""
    limit = max(1, min(128, context_length // 4))
    return 1 << (limit.bit_length() - 1)


def learn_shapes(model: DecoderModel, device: torch.device) -> list[LayerShape]:
    """The cache's shape from one recorded dry forward of a single token; nothing is declared anywhere."""
    return record_calls(model, device)
