"""A recorded plan tried beside its module, on one small step, before anything is served with it.

What cannot be recorded is refused while it is recorded. This is for what a recording takes for something else. Both run
in small float32 caches of their own; keys and values of every layer are compared, then logits.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from pellucid_model.kernels.modules import TWINS
from pellucid_server.engine.cache import KVCache, LayerShape
from pellucid_server.engine.ragged import StepRows

SEQUENCES = ((0.0, 6), (0.4, 1), (0.7, 3), (1.0, 1))
"""Where in the context a sequence's chunk stands, and how many tokens it has: prompts and decodes."""
REACH = 1024
"""Positions beyond it cost time and show nothing new."""
BLOCK_SIZE = 16
_EXACT, _ROUNDED = 1e-3, 2e-2
"""How far numbers may always lie apart, in parts of the largest one: where layers compute in float32, and where they
round to less. A plan sums up in another order than torch, so that some numbers are rounded to the other side."""
_NUDGE, _TIMES = 1e-6, 4.0
"""Layer after layer that grows. How much, the module itself tells: what its layers make is changed by so much at
random, and numbers may lie so many times as far apart as that puts them."""


class Runs(Protocol):
    """A step's forward pass."""

    def run(self, rows: StepRows) -> Tensor: ...


class Trial:
    """One step of random tokens, and the caches for it."""

    def __init__(self, shapes: list[LayerShape], vocab_size: int, context_length: int, *, exact: bool) -> None:
        """exact: layers compute in float32."""
        self._shapes = shapes
        self._rows, self._blocks = trial_rows(vocab_size, context_length)
        self._least = _EXACT if exact else _ROUNDED

    @torch.inference_mode()
    def disagreement(
        self, plan: Callable[[KVCache], Runs], by_module: Callable[[KVCache], Runs], module: nn.Module
    ) -> float | None:
        """How far a plan's numbers lie from its module's where they do so too far; else None.

        plan, by_module  make what runs a step in a cache
        """
        expected = self._numbers(by_module)
        apart = [distance(a, b) for a, b in zip(self._numbers(plan), expected, strict=True)]
        if max(apart) <= self._least:
            return None
        with _nudged(module):
            noise = [distance(a, b) for a, b in zip(self._numbers(by_module), expected, strict=True)]
        too_far = (each for each, own in zip(apart, noise, strict=True) if each > max(self._least, _TIMES * own))
        return next(too_far, None)

    def _numbers(self, forward: Callable[[KVCache], Runs]) -> list[Tensor]:
        """Keys and values of every layer, and the logits."""
        cache = KVCache(self._shapes, self._blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        logits = forward(cache).run(self._rows)
        return [*(each for layer in cache.layers for each in layer), logits]


def trial_rows(vocab_size: int, context_length: int) -> tuple[StepRows, int]:
    """A ragged step of random tokens, all of them sampled, and how many blocks it needs.

    Block 0 stands for everything before a chunk, and stays empty.
    """
    reach, numbers = min(context_length, REACH), random.Random(0)
    positions, row_sequence, tables = array("q"), array("i"), list[list[int]]()
    blocks = 1
    for sequence, (place, most) in enumerate(SEQUENCES):
        count = min(most, reach)
        start = int(place * (reach - count))
        positions.extend(range(start, start + count))
        row_sequence.extend([sequence] * count)
        before = start // BLOCK_SIZE
        own = (start + count - 1) // BLOCK_SIZE + 1 - before
        tables.append([0] * before + list(range(blocks, blocks + own)))
        blocks += own
    width = max(map(len, tables))
    rows = StepRows(
        tokens=array("q", (numbers.randrange(vocab_size) for _ in positions)),
        positions=positions,
        positions32=array("i", positions),
        row_sequence=row_sequence,
        block_tables=array("i", (block for each in tables for block in each + [-1] * (width - len(each)))),
        table_width=width,
        sampled_rows=array("q", range(len(positions))),
        length=max(positions) + 1,
        rolling=None,
    )
    return rows, blocks


def distance(a: Tensor, b: Tensor) -> float:
    """How far a lies from b, in parts of the largest number of b; infinite where only one of two is a number."""
    if torch.equal(a, b):
        return 0.0
    a, b = a.float(), b.float()
    finite = b.isfinite()
    if a.shape != b.shape or not torch.allclose(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    apart = float((a - b)[finite].abs().max() / b[finite].abs().max().clamp(min=1e-30))
    return apart if apart == apart else float("inf")


@contextmanager
def _nudged(module: nn.Module) -> Iterator[None]:
    """Every accelerated layer's numbers are a little off."""
    generator = torch.Generator().manual_seed(0)

    def nudge(layer: nn.Module, inputs: object, out: Tensor) -> Tensor:
        return out * (1 + _NUDGE * torch.randn(out.shape, generator=generator))

    hooks = [each.register_forward_hook(nudge) for each in module.modules() if isinstance(each, TWINS)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
