"""How a call's rows are shared out between threads, and who writes their keys and values, changes no bit.

Where each tile has all rows of its sequence, the unit that attends for its last keys has written them; else all are
written beforehand. Either way the cache holds what its layout writes, and the rows give what they give all together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pellucid_model.kernels import NativeKernels, library
from pellucid_model.kernels.cache_layout import INT8, GranuleLayout
from pellucid_testing.paged import PagedSequences, Setup
from pellucid_testing.plans import VARIANTS, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("one_torch_thread")]

Rows = list[tuple[int, int]]

LENGTHS = (127, 128, 129, 255, 256, 257, 40)
SETUP = Setup(lengths=LENGTHS, query_heads=6, kv_heads=2, dim=40, rotary_dim=40)
"""A tile has 32 rows, a decode of the longest sequence 3 pieces."""
THREADS = (1, 2, 3, 8)


def arranged(window: int, dtype: torch.dtype, block_size: int) -> Setup:
    """window 0: none; else it rolls, behind sinks."""
    rolling = window > 0
    return replace(SETUP, dtype=dtype, block_size=block_size, window=window, sinks=20 * rolling, rolling=rolling)


def last(sequence: int, count: int = 1) -> Rows:
    return [(sequence, t) for t in range(LENGTHS[sequence] - count, LENGTHS[sequence])]


def last_of_all(count: int) -> Rows:
    return [row for sequence in range(len(LENGTHS)) for row in last(sequence, count)]


WHOLE: dict[str, Rows] = {
    "single rows": last_of_all(1),
    "a single row": last(5),
    "a single row that ends a piece": last(4),
    "drafts": last_of_all(5),
    "drafts of two": last(2, 3) + last(5, 2),
    "drafts of one": last(5, 5),
    "a chunk": last(5, 31),
    "a chunk beside others": last(0, 1) + last(3, 32) + last(5, 1) + last(6, 7),
    "a whole prompt": last(1, 1) + last(6, 40)[:32],
}
"""Each tile has all rows of its sequence."""
PARTS: dict[str, Rows] = {
    "more rows than a tile has": last(5, 33),
    "a prompt": last(3, 255),
    "a prompt beside others": last(0, 1) + last(4, 100) + last(5, 2) + last(6, 1),
    "descending sequences": last(5) + last(4, 2) + last(0),
    "rows apart": [(0, 126), (5, 255), (0, 125), (5, 256), (5, 254)],
    "a sequence in two places": last(2, 2)[:1] + last(4, 3) + last(2),
}


def write(paged: PagedSequences, rows: Rows, *, spoiled: bool = False) -> None:
    """The rows' keys and values into the cache, as its layout does it; spoiled: other ones."""
    sequences, positions = (torch.tensor(each) for each in zip(*rows, strict=True))
    keys, values = (torch.stack([each[s][t] for s, t in rows]) for each in (paged.k, paged.v))
    size = paged.setup.block_size
    blocks = paged.block_tables[sequences, positions // size].long()
    keys, values = (7 - values, 7 - keys) if spoiled else (turned(paged, keys, positions), values)
    GranuleLayout().write((paged.k_cache, paged.v_cache), blocks, positions % size, keys, values)


def turned(paged: PagedSequences, keys: Tensor, positions: Tensor) -> Tensor:
    """keys [T, H, D], rotated in float32."""
    assert paged.angles is not None
    cos, sin = (each[positions][:, None] for each in paged.angles)
    x, y = keys.chunk(2, dim=-1)
    return torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)


def held(paged: PagedSequences) -> list[Tensor]:
    return [each.contiguous().view(torch.uint8) for each in (paged.k_cache, paged.v_cache)]


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8], ids=str)
@pytest.mark.parametrize("window", [0, 100])
def test_who_writes_and_who_attends_changes_no_bit(
    window: int, dtype: torch.dtype, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = NativeKernels(VARIANTS[0])
    setup = arranged(window, dtype, block_size)
    monkeypatch.setattr(library, "_threads", 1)
    paged, written = PagedSequences(setup), PagedSequences(setup)
    every = paged.all_rows()
    expected = dict(zip(every, paged.run_all(kernels), strict=True))
    write(written, every)
    assert all(map(torch.equal, held(paged), held(written)))
    for name, rows in (WHOLE | PARTS).items():
        write(paged, rows, spoiled=True)
        before = held(paged)
        for threads in THREADS:
            monkeypatch.setattr(library, "_threads", threads)
            paged.k_cache, paged.v_cache = (each.clone().view(dtype) for each in before)
            assert not any(map(torch.equal, held(paged), held(written)))
            out = paged.run(kernels, rows)
            assert all(map(torch.equal, held(paged), held(written))), f"{name}: the cache, {threads} threads"
            assert torch.equal(out, torch.stack([expected[row] for row in rows])), f"{name}: {threads} threads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8], ids=str)
@pytest.mark.parametrize("window", [0, 100])
def test_what_is_compared_is_attention(window: int, dtype: torch.dtype) -> None:
    paged = PagedSequences(arranged(window, dtype, 16))
    error = paged.run_all(NativeKernels(VARIANTS[0])).double() - paged.oracle()
    assert error.abs().max() < (2e-2 if dtype == torch.bfloat16 else 4e-4)


SMALL = Setup(lengths=(1, 15, 16, 17, 127, 128, 129, 130, 255, 256, 257, 300), kv_heads=5, dim=16, rotary_dim=16)
"""Rows enough that a unit has several heads of one."""


@pytest.mark.parametrize(
    ("variant", "group"), [*((variant, 2) for variant in VARIANTS), (VARIANTS[0], 1), (VARIANTS[0], 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 100, "sinks": 20, "rolling": True},
        {"alibi": True, "dim": 7, "rotary_dim": 0},
        {"bias_width": 9},
        {"dim": 64},
        {"dim": 96, "window": 100, "sinks": 20, "rolling": True},
    ],
    ids=str,
)
def test_a_unit_of_several_heads_changes_no_bit(
    changes: dict[str, Any], group: int, dtype: torch.dtype, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = NativeKernels(variant)
    setup = replace(SMALL, query_heads=5 * group, dtype=dtype, **changes)
    monkeypatch.setattr(library, "_threads", 1)
    paged = PagedSequences(setup)
    paged.v[7][60, 2] = torch.nan  # of one head of one sequence
    paged.run_all(kernels)
    rows = [(sequence, length - 1) for sequence, length in enumerate(setup.lengths)]
    before = held(paged)
    alone = torch.cat([paged.run(kernels, [row]) for row in rows])
    spoiled = alone.isnan().any(-1)
    assert not spoiled[:, : 2 * group].any()
    assert spoiled[7, 2 * group :].any()
    for threads in (1, 2, 3):
        monkeypatch.setattr(library, "_threads", threads)
        together = paged.run(kernels, rows)
        assert torch.equal(together.view(torch.int32), alone.view(torch.int32)), f"{threads} threads"
        assert all(map(torch.equal, held(paged), before)), f"{threads} threads"
