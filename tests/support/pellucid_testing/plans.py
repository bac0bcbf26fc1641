"""What tests of recorded plans share: a paged cache that a module and its plan can both run on, and modules.

`assert_same` and `assert_close` run the same steps through both and compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pellucid_model.contract import Attend, AttentionOptions, Rotary
from pellucid_model.gathered import Gathered
from pellucid_model.kernels import NativeKernels, RotaryTables, accelerate, library
from pellucid_model.kernels.cache_layout import stored_width
from pellucid_model.kernels.interface import WeightFormat
from pellucid_model.kernels.plan import Plan, PlanBatch, Program, fuse, record

VARIANTS = library.supported_variants()
needs_kernels = pytest.mark.skipif(not VARIANTS, reason="no compiled kernels")
BLOCK, BLOCKS = 8, 32


class Paged(Attend):
    """`attend` over a paged cache for one batch, and the cache itself."""

    def __init__(
        self,
        kernels: NativeKernels,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        *,
        blocks: int = BLOCKS,
        block: int = BLOCK,
    ) -> None:
        self.kernels = kernels
        self.positions = blocks * block
        self.layers: list[tuple[Tensor, Tensor]] = []
        """A layer without a shape of its own has its predecessor's cache."""
        for heads, dim in shapes:
            if not heads:
                self.layers.append(self.layers[-1])
                continue
            shape = (blocks, heads, block, stored_width(dim, dtype))
            keys, values = (torch.zeros(shape, dtype=dtype) for _ in "kv")
            self.layers.append((keys, values))
        self.batch: PlanBatch | None = None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        if self.batch is None:
            raise RuntimeError("there is no batch")
        rotary, window = options.rotary, options.window
        cos, sin = RotaryTables(rotary).table(self.positions) if rotary else (None, None)
        keys, values = self.layers[layer]
        tables = torch.as_tensor(self.batch.block_tables).view(-1, self.batch.table_width)
        return self.kernels.paged_attention(
            q,
            k,
            v,
            keys,
            values,
            row_sequence=torch.as_tensor(self.batch.row_sequence),
            positions=torch.as_tensor(self.batch.positions32),
            block_tables=tables,
            scale=options.scale,
            cos=cos,
            sin=sin,
            interleaved=rotary is not None and rotary.interleaved,
            alibi_slopes=options.alibi_slopes,
            distance_bias=options.distance_bias,
            window=None if window is None else torch.full((len(tables),), window, dtype=torch.int32),
            softcap=options.softcap,
        )

    def gathered(self, *args: Any, **options: Any) -> Gathered:
        raise NotImplementedError


def batch_of(plan: Plan, starts: Sequence[int], counts: Sequence[int]) -> PlanBatch:
    """The next tokens of two sequences, each with a half of the cache; the last row of each is sampled."""
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    rows = torch.repeat_interleave(torch.arange(2, dtype=torch.int32), torch.tensor(counts))
    return PlanBatch(
        tokens=(7 * positions + 3 * rows) % 50,
        positions=positions,
        positions32=positions.int(),
        row_sequence=rows,
        block_tables=torch.arange(BLOCKS, dtype=torch.int32),
        table_width=BLOCKS // 2,
        sampled_rows=torch.tensor(counts).cumsum(0) - 1,
        windows=[None if each is None else torch.full((2,), each, dtype=torch.int32) for each in plan.windows],
        angles=[RotaryTables(each).table(BLOCK * BLOCKS) for each in plan.rotaries],
    )


STEPS = (((0, 0), (9, 3)), ((9, 3), (5, 1)), ((14, 4), (1, 1)), ((15, 5), (1, 30)))
"""(starts, counts): prefill, a chunk beside a decode, two decodes, a decode beside a prompt's rest."""


def assert_same(
    module: nn.Module,
    shapes: Sequence[tuple[int, int]],
    format: WeightFormat,
    *,
    fused: bool,
    variant: str | None = None,
) -> Program:
    """Run the steps through the module and through its plan, each with a cache of its own; return the program.

    variant  of the kernels; the best one where there is none
    """
    kernels = NativeKernels(variant or VARIANTS[0])
    module = module.float().eval()
    accelerate(module, kernels, format)
    dtype = torch.float32 if format == "float32" else torch.bfloat16
    program = record(module, module)  # type: ignore[arg-type]
    by_module, by_plan = Paged(kernels, shapes, dtype), Paged(kernels, shapes, dtype)
    if fused:
        fuse(program)
    plan = Plan(program, kernels, by_plan.layers)
    with torch.inference_mode():
        for starts, counts in STEPS:
            batch = by_module.batch = batch_of(plan, starts, counts)
            hidden = module.forward(batch.tokens, batch.positions, by_module)
            expected = module.logits(hidden.index_select(0, batch.sampled_rows))  # type: ignore[operator]
            assert torch.equal(plan.run(batch), expected)
    assert all(torch.equal(a, b) for a, b in zip(flat(by_module), flat(by_plan), strict=True))
    return program


def assert_close(module: Odd, program: Program, kernels: NativeKernels, tolerance: float) -> None:
    """The same for an accelerated module whose own functions may give other last bits than the plan's."""
    by_module, by_plan = (Paged(kernels, [(4, 8)], torch.float32) for _ in range(2))
    plan = Plan(program, kernels, by_plan.layers)
    with torch.inference_mode():
        for starts, counts in STEPS:
            batch = by_module.batch = batch_of(plan, starts, counts)
            expected = module.logits(module(batch.tokens, batch.positions, by_module)[batch.sampled_rows])
            torch.testing.assert_close(plan.run(batch), expected, rtol=tolerance, atol=tolerance)


def flat(paged: Paged) -> list[Tensor]:
    return [tensor for layer in paged.layers for tensor in layer]


class Odd(nn.Module):
    """What a user might write: one fused projection, heads normalised, views, a residual in place, a cat, a scale."""

    position_scheme = "rotary"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.out = nn.Embedding(50, 24), nn.Linear(24, 3 * 32), nn.Linear(32, 24)
        self.key_norm, self.norm, self.head = nn.RMSNorm(8), nn.LayerNorm(24, bias=False), nn.Linear(48, 50)
        self.gain = nn.Parameter(torch.randn(24))
        self.rotary = Rotary.from_base(8, 100.0)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens) / 3
        q, k, v = self.qkv(self.norm(x) * self.gain).view(-1, 3, 4, 8).unbind(1)
        x += self.out(attend(0, q, self.key_norm(k), v, rotary=self.rotary, scale=0.5).flatten(1))
        return torch.cat((x, self.embedding(tokens) - x), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden) * 0.25
        return logits
