"""Two of the things that stand behind `attend`: the slow textbook reference and the one used in training.

The third, the paged KV cache, belongs to the serving engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid_model.contract import Attend, AttentionOptions, Rotary
from pellucid_model.errors import ModelError
from pellucid_model.gathered import Gathered, Rows, gather
from pellucid_model.positions import rotate


class SharedKeys:
    """Keys (rotated) and values of the layers of one forward, for layers that read another one's.

    From the second forward on, only what was asked for in an earlier one is kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._met: set[int] = set()
        self._wanted: set[int] = set()

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        if layer in self._met and layer not in self._wanted:
            self._kept.pop(layer, None)
            return
        self._met.add(layer)
        self._kept[layer] = (k, v)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self._kept:
            raise ModelError(f"kv_from = {layer}: no earlier layer of that number has keys and values of its own")
        self._wanted.add(layer)
        return self._kept[layer]


class ReferenceAttend(Attend):
    """softmax(q·kᵀ·scale + mask) v as the textbook writes it, in whatever dtype it is given. The oracle of every test.

    The batch holds whole sequences end to end. Nothing is cached and nothing is fast.
    """

    def __init__(self, lengths: Sequence[int], positions: Tensor, *, record: bool = False) -> None:
        """lengths: tokens of each sequence, adding up to T; positions [T]; record: keep the attention maps."""
        self.lengths = list(lengths)
        self.positions = positions
        self.maps: dict[int, list[Tensor]] | None = {} if record else None
        """Per layer, per sequence: attention weights [Hq, n, n]."""
        self._shared = SharedKeys()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        q = rotated(q, self.positions, options.rotary)
        k, v = keys_and_values(self._shared, layer, k, v, self.positions, options.rotary, kv_from)
        outputs = []
        for rows in _slices(self.lengths):
            scores = dense_scores(q[rows], k[rows], options)
            scores = scores + attention_bias(self.positions[rows], options, scores.dtype)
            weights = torch.softmax(scores, dim=-1)
            if self.maps is not None:
                self.maps.setdefault(layer, []).append(weights)
            values = per_query_head(v[rows], q.shape[1])
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs)

    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        k, v = keys_and_values(self._shared, layer, k, v, self.positions, rotary, None)
        sequence = torch.arange(len(self.lengths), device=k.device).repeat_interleave(
            torch.tensor(self.lengths, device=k.device)
        )
        rows = Rows.of(self.positions, sequence, len(self.lengths))

        def padded(x: Tensor, filler: int) -> Tensor:
            out = x.new_full((len(self.lengths), max(self.lengths), *x.shape[1:]), filler)
            out[rows.sequence, rows.index] = x
            return out

        unseen = int(self.positions.max()) + 1
        keys = (padded(k, 0), padded(v, 0), padded(self.positions, unseen))
        return gather(*keys, rows, rotary=rotary, window=window)


class TrainingAttend(Attend):
    """Attention over B rows of L tokens, laid end to end, through torch's fused operator.

    Rows are padded on the right or packed full; causality keeps padding out of sight of every real token.
    """

    def __init__(self, rows: int, length: int, *, dropout: float = 0.0, device: torch.device | None = None) -> None:
        self.rows = rows
        self.length = length
        self.dropout = dropout
        self.row_positions = torch.arange(length, device=device)
        self.positions = self.row_positions.repeat(rows)
        """[B·L], to be handed to the model."""
        self._shared = SharedKeys()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        q = rotated(q, self.positions, options.rotary)
        k, v = keys_and_values(self._shared, layer, k, v, self.positions, options.rotary, kv_from)
        q, k, v = (x.unflatten(0, (self.rows, self.length)).transpose(1, 2) for x in (q, k, v))  # [B, H, L, D]
        if options.softcap is not None:
            return self._with_softcap(q, k, v, options)
        plain = options.alibi_slopes is None and options.distance_bias is None and options.window is None
        mask = None if plain else attention_bias(self.row_positions, options, q.dtype)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=plain, scale=options.scale, dropout_p=self.dropout, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        k, v = keys_and_values(self._shared, layer, k, v, self.positions, rotary, None)
        sequence = torch.arange(self.rows, device=k.device).repeat_interleave(self.length)
        rows = Rows.of(self.positions, sequence, self.rows)
        k, v, positions = (x.unflatten(0, (self.rows, self.length)) for x in (k, v, self.positions))
        return gather(k, v, positions, rows, rotary=rotary, window=window)

    def _with_softcap(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """By hand, since torch's fused operator has no soft cap. q [B, Hq, L, D]; k, v [B, Hkv, L, D]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = capped(q @ k.transpose(-1, -2) * options.scale, options.softcap)
        scores = scores + attention_bias(self.row_positions, options, scores.dtype)
        weights = F.dropout(torch.softmax(scores, dim=-1), self.dropout)
        return (weights @ v).transpose(1, 2).flatten(0, 1)


def rotated(x: Tensor, positions: Tensor, rotary: Rotary | None) -> Tensor:
    """x [T, H, D], turned where that is asked for."""
    return x if rotary is None else rotate(x, positions, rotary)


def keys_and_values(
    shared: SharedKeys,
    layer: int,
    k: Tensor | None,
    v: Tensor | None,
    positions: Tensor,
    rotary: Rotary | None,
    kv_from: int | None,
) -> tuple[Tensor, Tensor]:
    """A layer's own keys, rotated, and values, which are kept for others; or those of the layer it reads."""
    if kv_from is not None:
        return shared.of(kv_from)
    if k is None or v is None:
        raise ModelError(f"layer {layer}: k and v are missing")
    k = rotated(k, positions, rotary)
    shared.keep(layer, k, v)
    return k, v


def attention_bias(
    positions: Tensor, options: AttentionOptions, dtype: torch.dtype, *, key_positions: Tensor | None = None
) -> Tensor:
    """What is added to one sequence's scores: -inf where a key is in the future or outside the window, and what its
    distance adds (ALiBi, or a table).

    positions [n], key_positions [n] (None: the same) -> [1 or Hq, n, n]. A window of W sees the query itself and the
    W - 1 positions before it.
    """
    keys = positions if key_positions is None else key_positions
    distance = positions[:, None] - keys[None, :]
    hidden = distance < 0
    if options.window is not None:
        hidden = hidden | (distance >= options.window)
    bias = torch.zeros_like(distance, dtype=dtype)[None]
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(device=positions.device, dtype=dtype)
        bias = -slopes[:, None, None] * distance.to(dtype)
    if options.distance_bias is not None:
        table = options.distance_bias.to(dtype)
        bias = table[:, distance.clamp(0, table.shape[1] - 1)]
    return bias.masked_fill(hidden, -math.inf)


def dense_scores(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    """q [n, Hq, D], k [n, Hkv, D], rotated -> [Hq, n, n]."""
    scores = torch.einsum("qhd,khd->hqk", q, per_query_head(k, q.shape[1])) * options.scale
    return capped(scores, options.softcap)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """[n, Hkv, D] -> [n, Hq, D]: query head h reads kv head h // (Hq / Hkv)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _slices(lengths: Sequence[int]) -> list[slice]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
