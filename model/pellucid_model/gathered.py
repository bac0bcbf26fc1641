"""What `attend.gathered` returns: keys and values of every sequence side by side, for any attention of one's own.

seen = attend.gathered(layer, k, v)
scores = torch.einsum("sqhd,skhd->shqk", seen.pad(q), seen.keys)
weights = scores.masked_fill(~seen.mask[:, None], -torch.inf).softmax(-1)
mixed = seen.ragged(torch.einsum("shqk,skhd->sqhd", weights, seen.values))  # [T, H, D]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid_model.contract import Rotary
from pellucid_model.positions import rotate


@dataclass(frozen=True, eq=False)
class Gathered:
    """S sequences, padded to the most rows Q and the most keys L of any of them."""

    keys: Tensor
    """[S, L, Hkv, D], rotated where `rotary` was given; 0 where no row looks."""
    values: Tensor
    """[S, L, Hkv, D]; 0 where no row looks."""
    mask: Tensor
    """[S, Q, L] bool: the row sees the key. A row of padding sees key 0, so that its softmax is finite."""
    distance: Tensor
    """[S, Q, L] int64: how far before the row the key stands, for a bias of one's own; 0 where it is not seen."""
    rows: Rows
    rotary: Rotary | None

    def pad(self, x: Tensor) -> Tensor:
        """[T, …] -> [S, Q, …], 0 in rows of padding."""
        padded = x.new_zeros(*self.mask.shape[:2], *x.shape[1:])
        padded[self.rows.sequence, self.rows.index] = x
        return padded

    def queries(self, q: Tensor) -> Tensor:
        """q [T, Hq, D] -> [S, Q, Hq, D], rotated as the keys are."""
        return self.pad(q if self.rotary is None else rotate(q, self.rows.positions, self.rotary))

    def ragged(self, x: Tensor) -> Tensor:
        """[S, Q, …] -> [T, …]."""
        return x[self.rows.sequence, self.rows.index]


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the T rows of a ragged batch stand. A sequence's rows lie together, sequences in ascending order."""

    positions: Tensor
    """[T]"""
    sequence: Tensor
    """[T] int64: which of the S sequences."""
    index: Tensor
    """[T] int64: which of its sequence's rows."""

    @staticmethod
    def of(positions: Tensor, sequence: Tensor, sequences: int) -> Rows:
        sequence = sequence.long()
        counts = torch.bincount(sequence, minlength=sequences)
        first = counts.cumsum(0) - counts
        index = torch.arange(len(sequence), device=sequence.device) - first[sequence]
        return Rows(positions, sequence, index)


@dataclass(frozen=True, eq=False)
class Rolling:
    """A rolling window of each sequence: see `kernels/interface.py` for the meaning of its parts."""

    window: Tensor
    """[S]; 0: none."""
    sinks: Tensor
    """[S]"""
    sink_query_positions: Tensor
    """[T]"""


def gather(
    keys: Tensor,
    values: Tensor,
    key_positions: Tensor,
    rows: Rows,
    *,
    rotary: Rotary | None,
    window: int | None,
    rolling: Rolling | None = None,
) -> Gathered:
    """Say what every row sees of keys, values [S, L, Hkv, D], which stand at key_positions [S, L].

    A layer with a `window` of its own uses the smaller of the two, and no sinks.
    """
    sequences, queries = len(keys), int(rows.index.max()) + 1 if len(rows.index) else 0
    place = (rows.sequence, rows.index)

    def padded(x: Tensor, filler: int) -> Tensor:
        out = x.new_full((sequences, queries), filler)
        out[place] = x
        return out[:, :, None]

    at = padded(rows.positions.long(), -1)  # a row of padding comes before every key
    distance = at - key_positions[:, None, :]
    mask = distance >= 0
    if rolling is not None:
        width = rolling.window.long()[:, None, None]
        rolls = width > 0
        if window is not None:
            width = width.clamp(max=window)
        behind = mask & rolls & (distance >= width)
        sinks = 0 if window is not None else rolling.sinks.long()[:, None, None]
        sees_sink = behind & (key_positions[:, None, :] < sinks)
        stands = padded(rolling.sink_query_positions.long(), 0) - key_positions[:, None, :]
        distance = torch.where(sees_sink, stands, distance)
        mask = (mask & ~behind) | sees_sink
    if window is not None:
        mask = mask & (distance < window)
    seen = mask.any(dim=1)[:, :, None, None]
    distance = distance.masked_fill(~mask, 0)
    mask[:, :, 0] |= at[:, :, 0] < 0
    return Gathered(keys.where(seen, 0), values.where(seen, 0), mask, distance, rows, rotary)
