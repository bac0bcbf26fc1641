"""The operators that a model's fast path is made of, as one protocol with two implementations: native and fallback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from pellucid_model.kernels.cache_layout import CacheLayout

WeightFormat = Literal["float32", "bfloat16", "int8", "int4"]
"""How weights of linear layers are stored; quantization.py says what the integers stand for."""
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
"""gelu is the exact one (erf); gelu_tanh its tanh approximation. A linear layer can end in one of these."""
Function = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "exp", "sqrt", "absolute", "reciprocal"]
"""All functions of single numbers."""
TableFormat = Literal["float32", "bfloat16", "float32 panels", "bfloat16 panels"]
"""Rows one after the other, or a packed linear layer's weight, whose outputs are the rows."""


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A linear layer's weights in the layout of the kernels that packed them.

    weight  packed; only the kernels that made it know its layout
    bias    [out_features], float32 for the native kernels, or None
    """

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    format: WeightFormat


@dataclass(frozen=True, eq=False)
class Table:
    """Rows that are looked up by number: [count, width]."""

    weight: Tensor
    count: int
    width: int
    format: TableFormat


class Kernels(Protocol):
    """Activations are float32 between operators; formats and dtypes concern stored weights and the KV cache."""

    @property
    def name(self) -> str:
        """What runs: a compiled variant ("amx", "avx512-bf16", "avx512", "avx2", "portable") or "torch"."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's result is the same to the last bit whatever else is in the batch."""
        ...

    @property
    def cache_layout(self) -> CacheLayout:
        """How the tensors of the KV cache are to be read and written by others."""
        ...

    def pack_linear(self, weight: Tensor, bias: Tensor | None, format: WeightFormat) -> PackedLinear:
        """Prepare weight [N, K] and bias [N] once. ValueError where the format cannot hold the weight."""
        ...

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x [..., K] -> [..., N]. x is rounded to bfloat16 or whole numbers where the weights are; sums are float32."""
        ...

    def make_table(self, rows: Tensor, format: Literal["float32", "bfloat16"]) -> Table:
        """A copy of rows [count, width] for `look_up`."""
        ...

    def table_of(self, packed: PackedLinear) -> Table | None:
        """A linear layer's weight [N, K] as a table of N rows in the same memory; None where it holds whole numbers."""
        ...

    def look_up(self, indices: Tensor, table: Table) -> Tensor:
        """Rows of the table as they are: indices [...] int64 -> [..., width] float32. IndexError beyond the table."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al., arXiv:1607.06450)."""
        ...

    def activation(self, kind: Function, x: Tensor) -> Tensor:
        """Elementwise, any shape."""
        ...

    def paged_attention(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        row_sequence: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        scale: float,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        interleaved: bool = False,
        alibi_slopes: Tensor | None = None,
        distance_bias: Tensor | None = None,
        window: Tensor | None = None,
        sinks: Tensor | None = None,
        sink_query_positions: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Write the new keys and values of T rows into the cache, then attend from each row. One layer.

        A row sees what rows of its own sequence write; a block that one sequence writes is no other sequence's in this
        call.

        q                     [T, Hq, D], not rotated
        k, v                  [T, Hkv, D], k not rotated; query head h reads kv head h // (Hq / Hkv); both None where
                              another layer has written the rows' keys and values into this cache already
        k_cache, v_cache      [blocks, Hkv, block_size, W], float32, bfloat16 or INT8, changed in place; keys are
                              rotated. cache_layout.py: W, and what lies where. block_size divides 16 or is a
                              multiple of it
        row_sequence          int32 [T]: which of the S sequences a row belongs to
        positions             int32 [T]: index in the sequence, hence its slot: block table[position // block_size]
        block_tables          int32 [S, n]: cache block of each block of positions; -1 where none is held, which is
                              never touched as long as no row sees it
        scale                 factor on q · k
        cos, sin              float32 [P, dim / 2] by position: rotates the first `dim` dimensions; None: no rotation
        interleaved           pairs are (0, 1), (2, 3), … instead of (0, dim/2), (1, dim/2 + 1), …
        alibi_slopes          float32 [Hq]: adds -slope * (query position - key position)
        distance_bias         float32 [Hq, B]: adds column min(query position - key position, B - 1)
        window                int32 [S]: a row at t sees positions t - window + 1 to t; 0 or None: everything up to t
        sinks                 int32 [S]: the first `sinks` positions stay visible when the window has moved past them
        sink_query_positions  int32 [T]: where the query stands (rotation, distance) when it looks at sinks that
                              its window has left behind; None: at its own position
        softcap               score = softcap * tanh(score / softcap), before what depends on distance
        returns               [T, Hq, D]

        ValueError names an argument whose type, shape or values do not fit. Two rows never share a slot.
        """
        ...
