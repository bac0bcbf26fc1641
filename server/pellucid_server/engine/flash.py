"""What stands behind `attend` where a fused kernel reads the paged cache: varlen.py's, on CUDA.

In: a step's ragged batch on the device, what the kernel wants to know of it, and each layer's q, k, v. Out: attention.
Side effects, per layer: keys are rotated and written with the values into the cache, then read through block tables,
or, where the kernel cannot do that, copied out of it.
A layer that the kernel cannot compute goes through PagedAttend instead, and `detours` says which and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pellucid_model.contract import Attend, AttentionOptions, Rotary
from pellucid_model.gathered import Gathered
from pellucid_model.kernels.cache_layout import PlainLayout
from pellucid_server.engine.cache import KVCache
from pellucid_server.engine.paged import Angles, PagedAttend
from pellucid_server.engine.ragged import RaggedBatch
from pellucid_server.engine.varlen import Varlen

WindowSize = Callable[[int | None], tuple[int, int] | None]
"""Of a layer with a window of its own, or without (None): what varlen_attn calls window_size; None where no single
window says what the batch's rows see."""


@dataclass(frozen=True)
class FlashBatch:
    """Where a step's rows lie in the cache and what they see, on the device: T rows of S sequences."""

    positions: Tensor
    """[T] int64."""
    blocks: Tensor
    """[T] int64, the cache block of each row's own position."""
    slots: Tensor
    """[T] int64, the place in it."""
    block_tables: Tensor
    """[S, n] int32, none negative."""
    row_bounds: Tensor
    """[S + 1] int32, where each sequence's rows begin, and T."""
    key_bounds: Tensor
    """[S + 1] int32, the same of its keys, were they laid end to end."""
    lengths: Tensor
    """[S] int32, keys of each sequence."""
    block_size: int
    most_rows: int
    most_keys: int
    """No sequence has more. A graph fixes both, so there it is what the block tables hold."""
    all_keys: int
    """All sequences together have no more."""
    window_size: WindowSize

    @staticmethod
    def of(host: RaggedBatch, batch: RaggedBatch, block_size: int) -> FlashBatch:
        """host: the batch on the CPU, where its numbers can be looked at; batch: the same on the device."""
        counts = torch.bincount(host.row_sequence, minlength=len(host.block_tables))  # [S]
        row_bounds = _bounds(counts)
        lengths = host.positions[row_bounds[1:].long() - 1].to(torch.int32) + 1
        device = batch.tokens.device
        tables = batch.block_tables.clamp(min=0)  # what no block holds is seen by no row, but a table must not say -1
        return FlashBatch(
            positions=batch.positions,
            blocks=tables[batch.row_sequence.long(), batch.positions // block_size].long(),
            slots=batch.positions % block_size,
            block_tables=tables,
            row_bounds=row_bounds.to(device, non_blocking=True),
            key_bounds=_bounds(lengths).to(device, non_blocking=True),
            lengths=lengths.to(device, non_blocking=True),
            block_size=block_size,
            most_rows=int(counts.max()),
            most_keys=int(lengths.max()),
            all_keys=int(lengths.sum()),
            window_size=lambda own: window_size(host, lengths, own, decoding=int(counts.max()) == 1),
        )

    @staticmethod
    def of_single_rows(positions: Tensor, block_tables: Tensor, block_size: int) -> FlashBatch:
        """S sequences of one row each, whose layers see everything but for their own windows. No value is looked at,
        so all of it can be recorded in a graph.

        positions [S] int64; block_tables [S, n] int32, none negative
        """
        lengths = (positions + 1).to(torch.int32)
        rows = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        return FlashBatch(
            positions=positions,
            blocks=block_tables[rows[:-1].long(), positions // block_size].long(),
            slots=positions % block_size,
            block_tables=block_tables,
            row_bounds=rows,
            key_bounds=_bounds(lengths),
            lengths=lengths,
            block_size=block_size,
            most_rows=1,
            most_keys=block_tables.shape[1] * block_size,
            all_keys=block_tables.numel() * block_size,
            window_size=lambda own: (-1, -1) if own is None else (own - 1, 0),
        )

    @cached_property
    def key_places(self) -> tuple[Tensor, Tensor]:
        """Block and slot of every key, [all_keys] int64 each, in the order of key_bounds. Those beyond mean nothing."""
        place = torch.arange(self.all_keys, dtype=torch.int32, device=self.positions.device)
        sequence = torch.searchsorted(self.key_bounds[1:], place, right=True).clamp(max=len(self.lengths) - 1)
        position = (place - self.key_bounds[sequence]).clamp(max=self.most_keys - 1).long()
        return self.block_tables[sequence, position // self.block_size].long(), position % self.block_size


def window_size(host: RaggedBatch, lengths: Tensor, own: int | None, *, decoding: bool) -> tuple[int, int] | None:
    """See WindowSize. host on the CPU; lengths [S] int32; decoding: every sequence has one row, its last."""
    everything = (-1, -1) if decoding else (-1, 0)
    windows = host.windows(own)  # [S], 0: none
    if windows is None:
        return everything
    sinks = torch.zeros_like(windows) if own is not None or host.rolling is None else host.rolling.sinks
    hiding = (windows > 0) & (lengths > windows + sinks)
    if not bool(hiding.any()):
        return everything
    window = int(windows[hiding][0])
    same = bool((windows[hiding] == window).all()) and bool((lengths[~hiding] <= window).all())
    return (window - 1, 0) if same and not bool(sinks[hiding].any()) else None


@dataclass(frozen=True)
class Rotation:
    """The rotation of a step's rows, made once for all layers: x · cos + swapped x · sin, which is few operators.

    Both are float32 [T, 1, dim], each angle standing at both numbers of its pair, the sines negative at the first.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @staticmethod
    def of(angles: tuple[Tensor, Tensor], positions: Tensor, *, interleaved: bool) -> Rotation:
        """angles: cos and sin by position [P, dim / 2]; positions [T] int64"""
        cos, sin = (table.index_select(0, positions)[:, None] for table in angles)
        place = -1 if interleaved else -2
        cosines, sines = torch.stack((cos, cos), dim=place), torch.stack((-sin, sin), dim=place)
        return Rotation(cosines.flatten(-2), sines.flatten(-2), interleaved)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H, D] with its first `dim` dimensions rotated, in float32, and rounded to x's type."""
        dim = self.cos.shape[-1]
        head = x[..., :dim]
        swapped = head.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if self.interleaved else head.roll(dim // 2, -1)
        turned = torch.addcmul(head * self.cos, swapped, self.sin).to(x.dtype)
        return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)


class FlashAttend(Attend):
    """One step's attention. Made anew for every step."""

    def __init__(
        self, varlen: Varlen, cache: KVCache, angles: Angles, batch: FlashBatch, length: int, paged: PagedAttend
    ) -> None:
        """length: of the rotary tables, more than any position; paged: for layers that the kernel cannot compute."""
        self.detours: list[str] = []
        self._varlen = varlen
        self._cache = cache
        self._angles = angles
        self._batch = batch
        self._length = length
        self._rotations: dict[Rotary, Rotation] = {}
        self._paged = paged

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        batch, (keys, values) = self._batch, self._cache.layers[layer]
        window = batch.window_size(options.window)
        refusal = self._varlen.refuses(q, keys, options)
        if refusal is not None or window is None:
            self.detours.append(f"layer {layer} {refusal or 'meets windows that differ, or sinks'}")
            return self._paged.attend(layer, q, k, v, options, kv_from)
        q, k = self._rotated(q, k, options.rotary)
        if k is not None and v is not None:
            PlainLayout().write((keys, values), batch.blocks, batch.slots, k, v)
        keys, values = (each.transpose(1, 2) for each in (keys, values))  # [blocks, block_size, Hkv, D]
        tables = {"seqused_k": batch.lengths, "block_table": batch.block_tables}
        if not self._varlen.reads_pages:
            keys, values = (each[batch.key_places] for each in (keys, values))  # [all_keys, Hkv, D]
            tables = {}
        return self._varlen.call(
            q,
            keys,
            values,
            batch.row_bounds,
            batch.key_bounds,
            batch.most_rows,
            batch.most_keys,
            scale=options.scale,
            window_size=window,
            **tables,
        )

    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        self.detours.append(f"layer {layer} takes the whole score matrix into its own hands")
        return self._paged.gathered(layer, k, v, rotary=rotary, window=window)

    def _rotated(self, q: Tensor, k: Tensor | None, rotary: Rotary | None) -> tuple[Tensor, Tensor | None]:
        """Both in one go: each operator is a launch."""
        if rotary is None:
            return q, k
        if rotary not in self._rotations:
            angles = self._angles.upto(self._length, rotary)
            rotation = Rotation.of(angles, self._batch.positions, interleaved=rotary.interleaved)
            self._rotations[rotary] = rotation
        turned = self._rotations[rotary](q if k is None else torch.cat((q, k), dim=1))
        return turned[:, : q.shape[1]], None if k is None else turned[:, q.shape[1] :]


def _bounds(counts: Tensor) -> Tensor:
    """[S] -> [S + 1] int32: 0 and the sums up to each."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
