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

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from pellucid_model.errors import ModelError

if TYPE_CHECKING:
    from pellucid_model.gathered import Gathered

PositionScheme = Literal["rotary", "alibi", "distance", "none", "absolute"]
"""How positions enter: by `rotary`, `alibi_slopes` or `distance_bias` handed to attend and in no other way, not at all,
or in a way that depends on where a token stands in the sequence."""
SCHEMES: tuple[str, ...] = get_args(PositionScheme)


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


class AttentionOptions(NamedTuple):
    """How one call of `attend` scores a key: score = f(q·k · scale) + what its distance adds."""

    scale: float
    rotary: Rotary | None = None
    alibi_slopes: Tensor | None = None
    distance_bias: Tensor | None = None
    window: int | None = None
    softcap: float | None = None


class Attend(ABC):
    """Causal attention of one layer over every sequence of the batch. A subclass says where the keys lie."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        scale: float | None = None,
        rotary: Rotary | None = None,
        alibi_slopes: Tensor | None = None,
        distance_bias: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
        kv_from: int | None = None,
    ) -> Tensor:
        """Attend over layer `layer`'s keys, the new ones included.

        q              [T, Hq, D], not rotated
        k, v           [T, Hkv, D], Hq a multiple of Hkv; query head h reads kv head h // (Hq / Hkv)
        scale          factor on q·k; None: 1/sqrt(D)
        rotary         rotate q and k by their positions
        alibi_slopes   [Hq], float32; adds -slope * distance to the score, distance = query position - key position
        distance_bias  [Hq, B], float32; adds column min(distance, B - 1), so the last one counts for all that is
                       farther (T5's relative bias: Raffel et al. 2020, arXiv:1910.10683). Not with alibi_slopes,
                       which is its linear case
        window         sees itself and the window - 1 tokens before it; None: everything before
        softcap        score = softcap * tanh(score / softcap), before what depends on distance
        kv_from        an earlier layer of this forward, whose keys and values (rotated as that layer asked) are read
                       in place of k and v, which are left out: the layer has no cache of its own
        returns        [T, Hq, D]

        ModelError where options exclude each other.
        """
        if (k is None) == (kv_from is None) or (k is None) != (v is None):
            raise ModelError(f"layer {layer}: attend takes either k and v, or kv_from")
        if alibi_slopes is not None and distance_bias is not None:
            raise ModelError(f"layer {layer}: attend takes alibi_slopes or distance_bias, not both")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        options = AttentionOptions(scale, rotary, alibi_slopes, distance_bias, window, softcap)
        return self.attend(layer, q, k, v, options, kv_from)

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        """What a call does once its arguments are known to fit together. -> [T, Hq, D]"""

    @abstractmethod
    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        """All keys and values that the rows may see, padded, for a module that needs the whole score matrix.

        k, v [T, Hkv, D], not rotated. Stands in place of the call, once per layer; slower, since the cache is copied,
        and what the module computes from it is not promised to be the same in company.
        """


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
