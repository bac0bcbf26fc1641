"""Two of the things that stand behind `attend`: the slow textbook reference and the one used in training.

The third, the paged KV cache, belongs to the serving engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid_model.contract import Rotary
from pellucid_model.positions import rotate


class ReferenceAttend:
    """softmax(q·kᵀ·scale + mask) v as the textbook writes it, in whatever dtype it is given. The oracle of every test.

    The batch holds whole sequences end to end. Nothing is cached and nothing is fast.
    """

    def __init__(self, lengths: Sequence[int], positions: Tensor, *, record: bool = False) -> None:
        """lengths: tokens of each sequence, adding up to T; positions [T]; record: keep the attention maps."""
        self.lengths = list(lengths)
        self.positions = positions
        self.maps: dict[int, list[Tensor]] | None = {} if record else None
        """Per layer, per sequence: attention weights [Hq, n, n]."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        rotary: Rotary | None = None,
        alibi_slopes: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if rotary is not None:
            q, k = rotate(q, self.positions, rotary), rotate(k, self.positions, rotary)
        outputs = []
        for rows in _slices(self.lengths):
            positions = self.positions[rows]
            scores = dense_scores(q[rows], k[rows], scale, softcap)
            scores = scores + attention_bias(positions, alibi_slopes, window, scores.dtype)
            weights = torch.softmax(scores, dim=-1)
            if self.maps is not None:
                self.maps.setdefault(layer, []).append(weights)
            values = per_query_head(v[rows], q.shape[1])
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs)


class TrainingAttend:
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

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        rotary: Rotary | None = None,
        alibi_slopes: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if rotary is not None:
            q, k = rotate(q, self.positions, rotary), rotate(k, self.positions, rotary)
        q, k, v = (x.unflatten(0, (self.rows, self.length)).transpose(1, 2) for x in (q, k, v))  # [B, H, L, D]
        if softcap is not None:
            return self._with_softcap(q, k, v, scale, alibi_slopes, window, softcap)
        plain = alibi_slopes is None and window is None
        mask = None if plain else attention_bias(self.row_positions, alibi_slopes, window, q.dtype)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=plain, scale=scale, dropout_p=self.dropout, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _with_softcap(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        alibi_slopes: Tensor | None,
        window: int | None,
        softcap: float,
    ) -> Tensor:
        """By hand, since torch's fused operator has no soft cap. q [B, Hq, L, D]; k, v [B, Hkv, L, D]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
        scores = softcap * torch.tanh(scores / softcap)
        scores = scores + attention_bias(self.row_positions, alibi_slopes, window, scores.dtype)
        weights = F.dropout(torch.softmax(scores, dim=-1), self.dropout)
        return (weights @ v).transpose(1, 2).flatten(0, 1)


def attention_bias(
    positions: Tensor,
    alibi_slopes: Tensor | None,
    window: int | None,
    dtype: torch.dtype,
    *,
    key_positions: Tensor | None = None,
) -> Tensor:
    """What is added to one sequence's scores: -inf where a key is in the future or outside the window, and ALiBi.

    positions [n], key_positions [n] (None: the same) -> [1 or Hq, n, n]. A window of W sees the query itself and the
    W - 1 positions before it.
    """
    keys = positions if key_positions is None else key_positions
    distance = positions[:, None] - keys[None, :]
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    bias = torch.zeros_like(distance, dtype=dtype)[None]
    if alibi_slopes is not None:
        bias = -alibi_slopes.to(device=positions.device, dtype=dtype)[:, None, None] * distance.to(dtype)
    return bias.masked_fill(hidden, -math.inf)


def dense_scores(q: Tensor, k: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    """q [n, Hq, D], k [n, Hkv, D] -> [Hq, n, n]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q, per_query_head(k, q.shape[1])) * scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """[n, Hkv, D] -> [n, Hq, D]: query head h reads kv head h // (Hq / Hkv)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _slices(lengths: Sequence[int]) -> list[slice]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
