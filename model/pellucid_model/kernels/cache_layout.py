"""How keys and values lie in the cache: for whoever reads or writes the cache beside `paged_attention`.

A layer's cache is two tensors, keys and values, [blocks, Hkv, block_size, W] each, where W is the head's dimension,
rounded up to even for bfloat16 (`stored_width`). A block of a kv head is one run of memory. What lies where within it
is the kernels' own business, told by their `cache_layout`:

    PlainLayout    [block_size, W], token by token
    GranuleLayout  granules of 16 tokens, as src/attention_cache.h describes them, so that the compiled kernels read
                   whole vectors
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

GRANULE = 16
"""Tokens that lie together in a GranuleLayout, where blocks are not smaller."""


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers that the cache keeps of a head's `head_dim`: bfloat16 numbers are kept in pairs."""
    return head_dim + head_dim % 2 if dtype == torch.bfloat16 else head_dim


class CacheLayout(Protocol):
    """Slots of blocks, read and written."""

    def write(self, cache: tuple[Tensor, Tensor], blocks: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, Hkv, D] of T tokens into slots [T] of blocks [T], both int64."""
        ...

    def read(self, cache: tuple[Tensor, Tensor], blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks [*n] int64: copies [*n, block_size, Hkv, D]."""
        ...


class PlainLayout:
    """Token by token."""

    def write(self, cache: tuple[Tensor, Tensor], blocks: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for stored, new in zip(cache, (keys, values), strict=True):
            stored[blocks, :, slots, : new.shape[-1]] = new.to(stored.dtype)

    def read(self, cache: tuple[Tensor, Tensor], blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        keys, values = (stored[blocks][..., :head_dim].transpose(-2, -3) for stored in cache)
        return keys, values


class GranuleLayout:
    """Granules of g tokens, in packs of p numbers: keys [W / p][g][p], values [g / p][W][p]."""

    def write(self, cache: tuple[Tensor, Tensor], blocks: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        stored_keys, stored_values = _by_token(cache)
        granule, within = slots // stored_keys.shape[3], slots % stored_keys.shape[3]
        width = cache[0].shape[3]
        padded = torch.nn.functional.pad(keys, (0, width - keys.shape[-1])).to(stored_keys.dtype)
        stored_keys[blocks, :, granule, within] = padded.unflatten(-1, stored_keys.shape[4:])
        pair, second = slots // stored_values.shape[3], slots % stored_values.shape[3]
        stored_values[blocks, :, pair, second, : values.shape[-1]] = values.to(stored_values.dtype)

    def read(self, cache: tuple[Tensor, Tensor], blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        keys, values = (stored[blocks] for stored in _by_token(cache))
        n = blocks.dim()
        keys, values = keys.flatten(-2).flatten(n + 1, n + 2), values.flatten(n + 1, n + 2)  # [*n, Hkv, block_size, W]
        return keys[..., :head_dim].transpose(-2, -3), values[..., :head_dim].transpose(-2, -3)


def _by_token(cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Views: keys [blocks, Hkv, granules, g, W / p, p], values [blocks, Hkv, block_size / p, p, W]."""
    keys, values = cache
    blocks, heads, size, width = keys.shape
    pack = 2 if keys.dtype == torch.bfloat16 else 1
    granule, value_pack = min(GRANULE, size), min(pack, size)
    return (
        keys.view(blocks, heads, size // granule, width // pack, granule, pack).transpose(3, 4),
        values.view(blocks, heads, size // value_pack, width, value_pack).transpose(3, 4),
    )
