"""How keys and values lie in the cache: for whoever reads or writes the cache beside `paged_attention`.

A layer's cache is two tensors, keys and values, [blocks, Hkv, block_size, W] each, where W is what a token takes of
them (`stored_width`). A block of a kv head is one run of memory. What lies where within it is the kernels' own
business, told by their `cache_layout`:

    PlainLayout    [block_size, W], token by token
    GranuleLayout  granules of 16 tokens, as src/attention_cache.h describes them, so that the compiled kernels read
                   whole vectors

Floats are stored as they are, bfloat16 in pairs. In an INT8 cache a number is scale * (q - 128), q from 1 to 255, in
fours, and beside them each token and kv head keeps its scale, a float32: its largest absolute value / 127.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

GRANULE = 16
"""Tokens that lie together in a GranuleLayout, where blocks are not smaller."""
INT8 = torch.uint8
"""The dtype of a cache that holds whole numbers and their scales."""
MOST_INT8_DIMENSIONS = 1024
"""Of a head in an INT8 cache: as many as 32 bits can sum exactly."""
_SCALE = 4  # bytes
_LEAST = 2.0**-100  # what is smaller counts as 0


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers that the cache keeps of a head's `head_dim`: whole packs, and the bytes of a scale where it has one."""
    pack = _pack(dtype)
    return -(-head_dim // pack) * pack + (_SCALE if dtype == INT8 else 0)


class CacheLayout(Protocol):
    """Slots of blocks, read and written."""

    def write(self, cache: tuple[Tensor, Tensor], blocks: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, Hkv, D] of T tokens into slots [T] of blocks [T], both int64."""
        ...

    def read(self, cache: tuple[Tensor, Tensor], blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks [*n] int64: copies [*n, block_size, Hkv, D], float32 where the cache is INT8."""
        ...


class PlainLayout:
    """Token by token, a scale behind the numbers."""

    def write(self, cache: tuple[Tensor, Tensor], blocks: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for stored, (new, scales) in zip(cache, _stored(keys, values, cache[0].dtype), strict=True):
            whole = new if scales is None else torch.cat((new, scales), dim=-1)
            stored[blocks, :, slots, : whole.shape[-1]] = whole

    def read(self, cache: tuple[Tensor, Tensor], blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        keys, values = (_restored(*_parts(stored[blocks])) for stored in cache)
        return keys[..., :head_dim].transpose(-2, -3), values[..., :head_dim].transpose(-2, -3)


class GranuleLayout:
    """Granules of g tokens, in packs of p numbers: keys [W / p][g][p], values [g / p][W][p]; then scales [g]."""

    def write(self, cache: tuple[Tensor, Tensor], blocks: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        (key_packs, key_scales), (value_packs, value_scales) = map(_by_granule, cache, (True, False))
        (keys, first_scales), (values, second_scales) = _stored(keys, values, cache[0].dtype)
        granule, within = slots // key_packs.shape[3], slots % key_packs.shape[3]
        key_packs[blocks, :, granule, within] = keys.unflatten(-1, key_packs.shape[4:])
        pack, place = within // value_packs.shape[4], within % value_packs.shape[4]
        value_packs[blocks, :, granule, pack, place] = values
        if first_scales is not None and second_scales is not None:
            key_scales[blocks, :, granule, within] = first_scales
            value_scales[blocks, :, granule, within] = second_scales

    def read(self, cache: tuple[Tensor, Tensor], blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        n = blocks.dim()
        (keys, key_scales), (values, value_scales) = (
            (packs[blocks], scales[blocks].flatten(n + 1, n + 2))
            for packs, scales in map(_by_granule, cache, (True, False))
        )
        keys, values = keys.flatten(-2).flatten(n + 1, n + 2), values.flatten(n + 1, n + 3)  # [*n, Hkv, block_size, W]
        keys, values = _restored(keys, key_scales), _restored(values, value_scales)
        return keys[..., :head_dim].transpose(-2, -3), values[..., :head_dim].transpose(-2, -3)


def _pack(dtype: torch.dtype) -> int:
    return {torch.bfloat16: 2, INT8: 4}.get(dtype, 1)


def _by_granule(cache: Tensor, is_keys: bool) -> tuple[Tensor, Tensor]:
    """Views of keys [blocks, Hkv, granules, g, W / p, p] or values [blocks, Hkv, granules, g / p, p, W], and of their
    scales' bytes [blocks, Hkv, granules, g, 4 or 0]."""
    blocks, heads, size, stride = cache.shape
    granule, pack = min(GRANULE, size), _pack(cache.dtype)
    width = stride - (_SCALE if cache.dtype == INT8 else 0)
    granules = cache.view(blocks, heads, size // granule, granule * stride)
    packs, scales = granules[..., : granule * width], granules[..., granule * width :]
    if is_keys:
        packs = packs.unflatten(-1, (width // pack, granule, pack)).transpose(3, 4)
    else:
        pack = min(pack, granule)
        packs = packs.unflatten(-1, (granule // pack, width, pack)).transpose(4, 5)
    return packs, scales.unflatten(-1, (granule, stride - width))


def _stored(keys: Tensor, values: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor | None]]:
    """Keys and values [T, Hkv, D] as the cache holds them: numbers [T, Hkv, W], and bytes of scales [T, Hkv, 4].

    Where a number of a token's key or value is not finite, both scales are NaN.
    """
    pack = _pack(dtype)
    padded = [torch.nn.functional.pad(x, (0, -x.shape[-1] % pack)) for x in (keys, values)]
    if dtype != INT8:
        return [(x.to(dtype), None) for x in padded]
    quantized = [_quantized(x.float()) for x in padded]
    finite = quantized[0][1].isfinite() & quantized[1][1].isfinite()
    return [(numbers, scale.where(finite, torch.nan).view(INT8)) for numbers, scale in quantized]


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., W] float32 -> whole numbers uint8 [..., W] and scales float32 [..., 1], NaN or infinite as x."""
    largest = x.abs().amax(-1, keepdim=True)
    usable = largest.isfinite() & (largest >= _LEAST)
    inverse = torch.where(usable, 127.0 / largest, 0.0)
    numbers = torch.where(usable, x * inverse, 0.0).round() + 128
    return numbers.to(INT8), torch.where(largest < _LEAST, 0.0, largest / 127)


def _parts(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [.., W] and bytes of scales [.., 4 or 0] that lie behind one another."""
    width = stored.shape[-1] - (_SCALE if stored.dtype == INT8 else 0)
    return stored[..., :width], stored[..., width:]


def _restored(numbers: Tensor, scales: Tensor) -> Tensor:
    """What numbers [.., W] and the bytes of their scales [.., 4 or 0] stand for."""
    if numbers.dtype != INT8:
        return numbers
    return (numbers.float() - 128) * scales.contiguous().view(torch.float32)
