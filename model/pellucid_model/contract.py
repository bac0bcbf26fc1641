"""The contract between a model and whatever runs it: training, the slow reference, or the serving engine.

A model is a module with two methods over a *ragged* batch, that is, all sequences' new tokens laid end to end
(T tokens in all):

    forward(tokens [T], positions [T], attend) -> hidden [T, d_model]
    logits(hidden [R, d_model]) -> [R, V]          only for the R rows that need a next token

Inside a layer the module makes q, k, v however it likes and calls `attend`. What stands behind `attend` (a dense
textbook softmax, torch's fused attention, a paged KV cache) is not the model's business, and it is all that differs
between training and serving.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

PositionScheme = Literal["rotary", "alibi", "none", "absolute"]


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embedding handed to `attend` as data (Su et al. 2021, arXiv:2104.09864).

    inv_freq     [dim / 2], float64: angle per position of each rotated pair.
    dim          rotated leading dimensions of a head, even, at most head_dim; the rest pass through.
    interleaved  pairs are (0, 1), (2, 3), … instead of (0, dim/2), (1, dim/2 + 1), …
    scale        factor on cos and sin (YaRN's attention factor); 1 for plain rotary.

    Angles are taken in float64 and cast after cos/sin: in float32 they are off by 8e-4 at position 10,000.
    """

    inv_freq: Tensor
    dim: int
    interleaved: bool = False
    scale: float = 1.0

    @staticmethod
    def from_base(dim: int, base: float, interleaved: bool = False) -> Rotary:
        """The usual geometric frequencies base^(-2i/dim)."""
        exponent = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
        return Rotary(inv_freq=base**-exponent, dim=dim, interleaved=interleaved)


class Attend(Protocol):
    """Causal attention of one layer over every sequence of the batch."""

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
        """Attend over layer `layer`'s keys, the new ones included.

        q             [T, Hq, D], not rotated
        k, v          [T, Hkv, D], Hq a multiple of Hkv; query head h reads kv head h // (Hq / Hkv)
        scale         factor on q·k; None: 1/sqrt(D)
        rotary        rotate q and k by their positions
        alibi_slopes  [Hq], float32; adds -slope * (query position - key position) to the score
        window        sees itself and the window - 1 tokens before it; None: everything before
        softcap       score = softcap * tanh(score / softcap), before the ALiBi bias
        returns       [T, Hq, D]
        """
        ...


class DecoderModel(Protocol):
    """What a servable model offers. Any nn.Module with these serves; nothing needs to be inherited."""

    position_scheme: PositionScheme
    """How positions enter. "absolute", the default for a scheme of one's own, is the safe answer."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens [T] int64, positions [T] int64 (absolute in the sequence) -> hidden [T, d_model]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d_model] -> [R, V]."""
        ...
