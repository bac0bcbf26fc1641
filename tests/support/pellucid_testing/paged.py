"""Sequences in a paged cache, run through any kernels in any order, and the float64 attention they must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pellucid_model.contract import Rotary
from pellucid_model.kernels import Kernels, RotaryTables
from pellucid_model.kernels.cache_layout import INT8, CacheLayout, PlainLayout, stored_width


@dataclass(frozen=True)
class Setup:
    """One layer's attention, and the lengths of the sequences it is tried on."""

    lengths: tuple[int, ...] = (1, 63, 64, 65, 129)
    query_heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    rotary_dim: int = 0
    interleaved: bool = False
    alibi: bool = False
    bias_width: int = 0
    """Columns of a table of biases by distance; 0: none."""
    bias_hides: int = 0
    """The distance from which on that bias is -infinity; 0: nowhere."""
    window: int = 0
    sinks: int = 0
    rolling: bool = False
    """Sinks are scored from the last position of the window, as in a rolling cache."""
    softcap: float | None = None

    def sink_query_position(self, position: int) -> int:
        return min(position, self.sinks + self.window - 1) if self.rolling and self.window else position

    def visible(self, position: int) -> list[int]:
        start = max(0, position - self.window + 1) if self.window else 0
        return sorted({*range(start, position + 1), *range(min(self.sinks, position + 1))})


def not_a_number(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A cache full of NaN; of scales that are NaN where it is INT8."""
    return torch.full(shape, 255 if dtype == INT8 else torch.nan, dtype=dtype)


class PagedSequences:
    """Random q, k, v of every sequence, and a cache of shuffled blocks that starts full of NaN."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        random = torch.Generator().manual_seed(seed)
        heads = {"q": setup.query_heads, "k": setup.kv_heads, "v": setup.kv_heads}
        made = [
            {name: torch.randn(length, count, setup.dim, generator=random) for name, count in heads.items()}
            for length in setup.lengths
        ]
        self.q, self.k, self.v = ([sequence[name] for sequence in made] for name in "qkv")
        self.scale = setup.dim**-0.5
        slopes = torch.tensor([2.0 ** -(8 * (h + 1) / setup.query_heads) for h in range(setup.query_heads)])
        self.alibi_slopes = slopes if setup.alibi else None
        table = torch.randn(setup.query_heads, setup.bias_width, generator=random)
        if setup.bias_hides:
            table[:, setup.bias_hides :] = -torch.inf
        self.distance_bias = table if setup.bias_width else None
        self.angles: tuple[Tensor, Tensor] | None = None
        if setup.rotary_dim:
            self.angles = RotaryTables(Rotary.from_base(setup.rotary_dim, 10_000.0)).table(max(setup.lengths))

        width = max(-(-length // setup.block_size) for length in setup.lengths)
        needed = [-(-length // setup.block_size) for length in setup.lengths]
        order = torch.randperm(sum(needed) + 1, generator=random)[: sum(needed)].int()
        self.block_tables = torch.full((len(needed), width), -1, dtype=torch.int32)
        for sequence, blocks in enumerate(order.split(needed)):
            self.block_tables[sequence, : len(blocks)] = blocks
        shape = (sum(needed) + 1, setup.kv_heads, setup.block_size, stored_width(setup.dim, setup.dtype))
        self.k_cache, self.v_cache = (not_a_number(shape, setup.dtype) for _ in range(2))
        self.layout: CacheLayout = PlainLayout()
        """Of the kernels that ran last."""

    def all_rows(self) -> list[tuple[int, int]]:
        return [(s, t) for s, length in enumerate(self.setup.lengths) for t in range(length)]

    def run(self, kernels: Kernels, rows: Sequence[tuple[int, int]], *, write: bool = True) -> Tensor:
        """One call for the given (sequence, position) rows -> [len(rows), Hq, D]; write: their keys and values too."""
        setup, self.layout = self.setup, kernels.cache_layout
        count = len(setup.lengths)
        return kernels.paged_attention(
            torch.stack([self.q[s][t] for s, t in rows]),
            torch.stack([self.k[s][t] for s, t in rows]) if write else None,
            torch.stack([self.v[s][t] for s, t in rows]) if write else None,
            self.k_cache,
            self.v_cache,
            row_sequence=torch.tensor([s for s, _ in rows], dtype=torch.int32),
            positions=torch.tensor([t for _, t in rows], dtype=torch.int32),
            block_tables=self.block_tables,
            scale=self.scale,
            cos=None if self.angles is None else self.angles[0],
            sin=None if self.angles is None else self.angles[1],
            interleaved=setup.interleaved,
            alibi_slopes=self.alibi_slopes,
            distance_bias=self.distance_bias,
            window=torch.full((count,), setup.window, dtype=torch.int32),
            sinks=torch.full((count,), setup.sinks, dtype=torch.int32),
            sink_query_positions=torch.tensor([setup.sink_query_position(t) for _, t in rows], dtype=torch.int32),
            softcap=setup.softcap,
        )

    def run_all(self, kernels: Kernels, chunk: int | None = None) -> Tensor:
        """Every row of every sequence, each sequence in steps of `chunk` tokens -> [sum of lengths, Hq, D]."""
        done: dict[tuple[int, int], Tensor] = {}
        longest = max(self.setup.lengths)
        for start in range(0, longest, chunk or longest):
            rows = [row for row in self.all_rows() if start <= row[1] < start + (chunk or longest)]
            done.update(zip(rows, self.run(kernels, rows), strict=True))
        return torch.stack([done[row] for row in self.all_rows()])

    def cached(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the cache holds of a sequence: [length, Hkv, D] each, float64."""
        length, size = self.setup.lengths[sequence], self.setup.block_size
        held = self.block_tables[sequence, : -(-length // size)].long()
        keys, values = self.layout.read((self.k_cache, self.v_cache), held, self.setup.dim)
        return keys.flatten(0, 1)[:length].double(), values.flatten(0, 1)[:length].double()

    def oracle(self) -> Tensor:
        """Attention in float64 over what the cache now holds: [sum of lengths, Hq, D]."""
        group = self.setup.query_heads // self.setup.kv_heads
        out = []
        for sequence in range(len(self.setup.lengths)):
            keys, values = (each.repeat_interleave(group, dim=1) for each in self.cached(sequence))
            out.append(self._oracle_sequence(sequence, keys, values))
        return torch.cat(out)

    def _oracle_sequence(self, sequence: int, keys: Tensor, values: Tensor) -> Tensor:
        setup, length = self.setup, self.setup.lengths[sequence]
        positions = torch.arange(length)
        sink_positions = torch.tensor([setup.sink_query_position(t) for t in range(length)])
        visible = torch.zeros(length, length, dtype=torch.bool)
        for t in range(length):
            visible[t, setup.visible(t)] = True
        behind = positions <= positions[:, None] - (setup.window or length)  # sinks, where visible
        scores = torch.empty(setup.query_heads, length, length, dtype=torch.float64)
        for stands, where in ((positions, ~behind), (sink_positions, behind)):
            query = self.rotated(self.q[sequence].double(), stands)
            score = torch.einsum("thd,jhd->htj", query, keys) * self.scale
            if setup.softcap:
                score = setup.softcap * torch.tanh(score / setup.softcap)
            distance = stands[:, None] - positions
            if self.alibi_slopes is not None:
                score = score - self.alibi_slopes.double()[:, None, None] * distance
            if self.distance_bias is not None:
                score = score + self.distance_bias.double()[:, distance.clamp(0, setup.bias_width - 1)]
            scores[:, where] = score[:, where]
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
        return torch.einsum("htj,jhd->thd", weights, values)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, H, D] in float64, rotated pair by pair as complex numbers."""
        dim = self.setup.rotary_dim
        if not dim:
            return x
        angle = positions.double()[:, None] * Rotary.from_base(dim, 10_000.0).inv_freq
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # [n, 1, dim / 2]
        first, second = (
            (slice(0, dim, 2), slice(1, dim, 2))
            if self.setup.interleaved
            else (
                slice(0, dim // 2),
                slice(dim // 2, dim),
            )
        )
        turned = torch.complex(x[..., first], x[..., second]) * turn
        out = x.clone()
        out[..., first], out[..., second] = turned.real, turned.imag
        return out

    def with_setup(self, **changes: object) -> PagedSequences:
        """The same q, k, v under another setup, with an empty cache."""
        other = PagedSequences(replace(self.setup, **changes))  # type: ignore[arg-type]
        other.q, other.k, other.v = self.q, self.k, self.v
        other.distance_bias = self.distance_bias
        return other
