"""The slow references of the two sliding windows: everything is recomputed, nothing is cached.

`docs/windows.md` draws what they say. The serving engine is tested against them row by row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pellucid_model.attention import (
    ReferenceAttend,
    SharedKeys,
    attention_bias,
    dense_scores,
    keys_and_values,
    per_query_head,
    rotated,
)
from pellucid_model.contract import Attend, AttentionOptions, DecoderModel, Rotary
from pellucid_model.gathered import Gathered, Rolling, Rows, gather


class RollingAttend(Attend):
    """Textbook attention of one whole sequence under a rolling window with sinks.

    Row t < sinks + window is plain causal attention. A later row sees keys 0 … sinks-1 and t-window+1 … t; it looks at
    the sinks from position sinks + window - 1, where it would stand in a cache that holds just these keys.
    A layer with a window of its own uses the smaller of the two, and no sinks.
    """

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window
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
        t = torch.arange(len(q))
        k, v = keys_and_values(self._shared, layer, k, v, t, options.rotary, kv_from)
        from_sinks = t.clamp(max=self.sinks + self.window - 1)
        sinks = self.sinks if options.window is None else 0
        width = self.window if options.window is None else min(options.window, self.window)
        behind = t[:, None] - t[None, :] >= width  # [query, key]: the window has moved past the key
        unbounded = options._replace(window=None)

        def scores(query_positions: Tensor) -> Tensor:
            query = rotated(q, query_positions, options.rotary)
            bias = attention_bias(query_positions, unbounded, q.dtype, key_positions=t)
            return dense_scores(query, k, options) + bias

        merged = torch.where(behind & (t < sinks), scores(from_sinks), scores(t))
        merged = merged.masked_fill(behind & (t >= sinks), -math.inf)
        return torch.einsum("hqk,khd->qhd", torch.softmax(merged, dim=-1), per_query_head(v, q.shape[1]))

    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        t = torch.arange(len(k))
        k, v = keys_and_values(self._shared, layer, k, v, t, rotary, None)
        rolling = Rolling(
            torch.tensor([self.window]), torch.tensor([self.sinks]), t.clamp(max=self.sinks + self.window - 1)
        )
        rows = Rows.of(t, torch.zeros_like(t), 1)
        return gather(k[None], v[None], t[None], rows, rotary=rotary, window=window, rolling=rolling)


def rolling_logits(model: DecoderModel, tokens: list[int], sinks: int, window: int) -> Tensor:
    """Logits [n, V] at every token of a sequence of any length under a rolling window."""
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        return model.logits(model.forward(torch.tensor(tokens), positions, RollingAttend(sinks, window)))


def reencoded_logits(
    model: DecoderModel, tokens: list[int], sinks: int, window: int, hop: int, first: int = 0
) -> Tensor:
    """Logits [n - first, V] at tokens `first`, … of a sequence of any length, each from its own view of the past.

    Token t's view is the sinks and what follows the origin, at positions 0, 1, 2, …; sinks = 0, hop = 1 is "crop to
    the last `window` tokens and recompute".
    """
    rows = []
    for t in range(first, len(tokens)):
        origin = sinks + hop * max(0, math.ceil((t + 1 - sinks - window) / hop))
        view = tokens[:sinks] + tokens[origin : t + 1] if t >= sinks + window else tokens[: t + 1]
        positions = torch.arange(len(view))
        with torch.no_grad():
            hidden = model.forward(torch.tensor(view), positions, ReferenceAttend([len(view)], positions))
            rows.append(model.logits(hidden[-1:]))
    return torch.cat(rows)
