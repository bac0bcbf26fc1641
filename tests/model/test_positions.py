"""Position encodings against their formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from pellucid_model.contract import Rotary
from pellucid_model.positions import (
    SinusoidalPositions,
    alibi_slopes,
    llama3_frequencies,
    rotate,
    sinusoidal_table,
    yarn_attention_factor,
    yarn_frequencies,
)


def test_sinusoidal_table_is_the_formula() -> None:
    table = sinusoidal_table(50, 6)
    for t in (0, 1, 49):
        for i in range(3):
            angle = t / 10000 ** (2 * i / 6)
            assert table[t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_sinusoidal_positions_keep_their_precision_in_float64() -> None:
    module = SinusoidalPositions(20, 8).double()
    assert torch.equal(module(torch.tensor([19, 3]), torch.float64), sinusoidal_table(20, 8)[[19, 3]])
    assert module(torch.tensor([1]), torch.float32).dtype == torch.float32


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 8])
def test_rotation_turns_pairs_and_leaves_the_rest(dim: int, interleaved: bool) -> None:
    rotary = Rotary.from_base(dim, 100.0, interleaved)
    x = torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 7, 10_000])
    turned = rotate(x, positions, rotary)
    for row, t in enumerate(positions.tolist()):
        for i in range(dim // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
            angle = t * 100.0 ** (-2 * i / dim)
            want = complex(x[row, 1, a], x[row, 1, b]) * complex(math.cos(angle), math.sin(angle))
            assert complex(turned[row, 1, a], turned[row, 1, b]) == pytest.approx(want, abs=1e-9)
    assert torch.equal(turned[..., dim:], x[..., dim:])


def test_rotated_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary.from_base(8, 10000.0)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = [
        (rotate(q, torch.tensor([t + 5]), rotary) * rotate(k, torch.tensor([t]), rotary)).sum().item()
        for t in (0, 123, 99_999)
    ]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-9)


def test_rotation_in_float32_keeps_float64_angles() -> None:
    rotary = Rotary.from_base(64, 10000.0)
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(2))
    at = torch.tensor([1_000_000])
    assert (rotate(x, at, rotary) - rotate(x.double(), at, rotary)).abs().max().item() < 1e-6


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0 ** -(i + 1) for i in range(8)]),
        (1, [2.0**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [*(2.0 ** -(i + 1) for i in range(8)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_for_any_head_count(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads).tolist() == pytest.approx(slopes, rel=1e-6)


def test_llama3_keeps_fast_pairs_slows_down_slow_ones_and_blends_between() -> None:
    turns = torch.tensor([8.0, 4.0, 2.5, 1.0, 0.5], dtype=torch.float64)  # in the original context
    frequencies = turns * 2 * math.pi / 64
    scaled = llama3_frequencies(frequencies, factor=8.0, low=1.0, high=4.0, original=64)
    assert (scaled / frequencies).tolist() == pytest.approx([1.0, 1.0, 0.5 + 0.5 / 8, 1 / 8, 1 / 8])


def test_yarn_keeps_fast_pairs_and_slows_down_slow_ones() -> None:
    frequencies = Rotary.from_base(64, 10000.0).inv_freq
    share = yarn_frequencies(frequencies, 10000.0, factor=4.0, original=4096) / frequencies
    turns = 4096 * frequencies / (2 * math.pi)
    assert torch.equal(share[turns > 40], torch.ones_like(share[turns > 40]))
    assert share[turns < 0.7].tolist() == pytest.approx([0.25] * int((turns < 0.7).sum()))
    assert bool((share.diff() <= 0).all())
    assert 0 < int((turns < 0.7).sum()) < 20
    assert yarn_attention_factor(4.0) == pytest.approx(1 + 0.1 * math.log(4))
    assert yarn_attention_factor(0.5) == 1.0
