"""Modules so wide that the threads of a step share its instructions, and steps that keep them busy.

A single row of most of these layers is more than `2 * kWorkPerMember` of src/parallel.h; of norms, and of what stands
between layers, the rows of a prompt are. A few layers are less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pellucid_model.contract import Attend, Rotary
from pellucid_model.kernels import NativeKernels, RotaryTables, accelerate
from pellucid_model.kernels.interface import WeightFormat
from pellucid_model.kernels.plan import Plan, PlanBatch, Program, fuse, record
from pellucid_testing.plans import VARIANTS, Paged

WIDTH, HEADS, KV_HEADS, DIM, VOCABULARY = 400, 8, 4, 50, 130
SHAPES = ((KV_HEADS, DIM), (0, 0))
BLOCK = 16
LONG, SHORT = 20, 2
"""Blocks of the first two sequences, and of all others."""
SEQUENCES = 40
BLOCKS = 2 * LONG + (SEQUENCES - 2) * SHORT

STEPS: tuple[dict[int, int], ...] = (
    {0: 1},
    {0: 1, 1: 1},
    {0: 130},
    {1: 8},
    dict.fromkeys(range(17), 1),
    {0: 90, 1: 28, **dict.fromkeys(range(2, 14), 1)},
    dict.fromkeys(range(40), 1),
    {0: 37, 1: 1, 2: 1, 3: 1},
    {0: 1},
    dict.fromkeys(range(8), 1),
    dict.fromkeys(range(17), 1),
)
"""Rows of each sequence: single ones, prompts longer and shorter than a tile, and both beside each other."""


class Wide(nn.Module):
    """Two layers of attention over one's keys, several norms and activations, residuals within and between layers."""

    position_scheme = "rotary"

    def __init__(self, windows: tuple[int | None, int | None] = (None, 100)) -> None:
        """windows: of the layers."""
        super().__init__()
        self.windows = windows
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONG * BLOCK, WIDTH)
        self.norm, self.norm2, self.key_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH), nn.RMSNorm(DIM)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, KV_HEADS * DIM)
        self.value, self.out = nn.Linear(WIDTH, KV_HEADS * DIM, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 333), nn.Linear(WIDTH, 333), nn.Linear(333, WIDTH)
        self.query2, self.out2, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(800, VOCABULARY)
        self.narrow, self.widen = nn.Linear(WIDTH, 60), nn.Linear(60, WIDTH)
        self.mix, self.mix_norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)
        self.silu, self.sigmoid, self.tanh = nn.SiLU(), nn.Sigmoid(), nn.Tanh()
        self.bias, self.gain = nn.Parameter(torch.randn(HEADS, 30)), nn.Parameter(torch.randn(WIDTH))
        self.rotary = Rotary.from_base(DIM, 100.0)

    def between(self, x: Tensor) -> Tensor:
        """Of [T, WIDTH], what stands between the two layers."""
        return x

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens) / 3 + self.places(positions)
        h = self.norm(x)
        q, k, v = (each(h).unflatten(1, (-1, DIM)) for each in (self.query, self.key, self.value))
        x = x + self.out(attend(0, q, self.key_norm(k), v, rotary=self.rotary, window=self.windows[0]).flatten(1))
        h = self.norm2(x) * self.gain
        x = self.between(x + self.down(self.silu(self.gate(h)) * self.up(h)))
        q = self.query2(x).unflatten(1, (-1, DIM))
        mixed = attend(1, q, kv_from=0, distance_bias=self.bias.detach(), window=self.windows[1])
        x *= self.sigmoid(x)
        x += self.widen(self.narrow(x))
        x *= 0.75
        x += self.mix(self.mix_norm(x))
        x += self.mix(x)
        return torch.cat((x - self.out2(mixed.flatten(1)), x), dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = 2 * self.tanh(self.head(hidden) / 2)
        return logits


class Between(Wide):
    """With what a plan computes by functions of its own, which are torch's but for the last bits."""

    def between(self, x: Tensor) -> Tensor:
        heads = x.unflatten(1, (-1, DIM))
        x = x * heads.softmax(-1).flatten(1) + x.flip(-1).clamp(-0.5, 0.4)
        return x + x.abs().amax(-1, keepdim=True) - x.sum(-1, keepdim=True) / WIDTH


def batches(plan: Plan, steps: Sequence[dict[int, int]] = STEPS, rolling: bool = False) -> Iterator[PlanBatch]:
    """The steps, one after the other. Rolling: the first layer sees 4 sinks and the last 60 positions."""
    blocks = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).int()
    tables = torch.full((SEQUENCES, LONG), -1, dtype=torch.int32)
    for sequence, own in enumerate(blocks.split([LONG] * 2 + [SHORT] * (SEQUENCES - 2))):
        tables[sequence, : len(own)] = own
    filled = [0] * SEQUENCES
    for step in steps:
        counts = torch.tensor(list(step.values()))
        positions = torch.cat([torch.arange(filled[s], filled[s] + count) for s, count in step.items()])
        rows = torch.repeat_interleave(torch.arange(len(step), dtype=torch.int32), counts)
        for sequence, count in step.items():
            filled[sequence] += count
        windows = (60 if rolling and each is None else each for each in plan.windows)
        yield PlanBatch(
            tokens=(7 * positions + 3 * rows) % VOCABULARY,
            positions=positions,
            positions32=positions.int(),
            row_sequence=rows,
            block_tables=tables[list(step)].flatten(),
            table_width=LONG,
            sampled_rows=counts.cumsum(0) - 1,
            windows=[None if each is None else torch.full((len(step),), each, dtype=torch.int32) for each in windows],
            angles=[RotaryTables(each).table(LONG * BLOCK) for each in plan.rotaries],
            sinks=torch.full((len(step),), 4, dtype=torch.int32) if rolling else None,
            sink_query_positions=positions.int().clamp(max=63) if rolling else None,
        )


def recorded(module: Wide, format: WeightFormat, *, fused: bool) -> tuple[NativeKernels, Program]:
    """The program of a module, whose layers are accelerated in place."""
    kernels, module = NativeKernels(VARIANTS[0]), module.float().eval()
    accelerate(module, kernels, format)
    program = record(module, module)  # type: ignore[arg-type]
    if fused:
        fuse(program)
    return kernels, program


def cache(kernels: NativeKernels, dtype: torch.dtype = torch.float32) -> Paged:
    return Paged(kernels, SHAPES, dtype, blocks=BLOCKS, block=BLOCK)


def results(plan: Plan, paged: Paged, **options: Any) -> list[Tensor]:
    """Logits of every step, those of all rows where there are many, and the cache in the end."""
    logits = []
    for batch in batches(plan, **options):
        logits.append(plan.run(batch).clone())
        if len(batch.tokens) > 100:
            logits.append(plan.more_logits(batch, torch.arange(len(batch.tokens))).clone())
    return [*logits, *paged.layers[0]]


def results_of_module(module: Wide, plan: Plan, paged: Paged) -> list[Tensor]:
    logits = []
    with torch.inference_mode():
        for batch in batches(plan):
            paged.batch = batch
            hidden = module.forward(torch.as_tensor(batch.tokens), torch.as_tensor(batch.positions), paged)
            logits.append(module.logits(hidden[batch.sampled_rows]))
            if len(hidden) > 100:
                logits.append(module.logits(hidden))
    return [*logits, *paged.layers[0]]
