"""The formulas of the position encodings; each in one place for training, the reference and serving."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pellucid_model.contract import Rotary


def sinusoidal_table(length: int, d_model: int) -> Tensor:
    """sin on even, cos on odd dimensions with wavelengths 2π … 10000·2π -> [length, d_model] float64.

    Vaswani et al. 2017, section 3.5.
    """
    position = torch.arange(length, dtype=torch.float64, device="cpu")[:, None]
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu") / d_model
    angle = position * 10000.0**-exponent
    return torch.stack((angle.sin(), angle.cos()), dim=-1).reshape(length, d_model)


class SinusoidalPositions(nn.Module):
    """Adds nothing to a checkpoint: the table is a formula, kept in float64 and cast to what is asked for."""

    def __init__(self, length: int, d_model: int) -> None:
        super().__init__()
        self._table = sinusoidal_table(length, d_model)
        self._cast: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """positions [T] -> [T, d_model]."""
        key = (dtype, positions.device)
        if key not in self._cast:
            self._cast[key] = self._table.to(device=positions.device, dtype=dtype)
        return self._cast[key].index_select(0, positions)


def rotary_angles(positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, each [T, dim / 2] float64, scaled by `rotary.scale`."""
    angle = positions.to(torch.float64)[:, None] * rotary.inv_freq.to(positions.device)
    return angle.cos() * rotary.scale, angle.sin() * rotary.scale


def rotate(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the first `rotary.dim` dimensions of x [T, H, D] by positions [T]; the rest passes through."""
    cos, sin = (part.to(x.dtype)[:, None, :] for part in rotary_angles(positions, rotary))
    head, rest = x[..., : rotary.dim], x[..., rotary.dim :]
    if rotary.interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = head.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def llama3_frequencies(frequencies: Tensor, *, factor: float, low: float, high: float, original: int) -> Tensor:
    """Llama 3.1's scaling of rotary frequencies [dim / 2] -> [dim / 2].

    Pairs that turn fewer than `low` times in the `original` context are slowed down by `factor`, those that turn more
    than `high` times are kept, and those between are blended in proportion (Grattafiori et al. 2024, arXiv:2407.21783).
    """
    turns = original * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def yarn_frequencies(
    frequencies: Tensor,
    base: float,
    *,
    factor: float,
    original: int,
    fast: float = 32.0,
    slow: float = 1.0,
    whole: bool = True,
) -> Tensor:
    """YaRN's scaling of rotary frequencies base^(-2i/dim) [dim / 2] -> [dim / 2] (Peng et al. 2023, arXiv:2309.00071).

    Pairs that turn more than `fast` times in the `original` context are kept, those below `slow` times are slowed down
    by `factor`; between the two pairs where that happens the share falls linearly. whole: rounded outwards to whole
    pairs, as most implementations do it.
    """
    dim = 2 * len(frequencies)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_that_turns(fast), pair_that_turns(slow)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001  # a step where they meet
    slowed = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - first) / width).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / factor)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1: what YaRN multiplies cos and sin with, so that scores grow with the context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def alibi_slopes(heads: int) -> Tensor:
    """Per-head slopes [heads] float32 (Press et al. 2022, arXiv:2108.12409).

    A power of two n gives 2^(-8/n), 2^(-16/n), …; other counts take those of the next lower power of two and then
    every second slope of the doubled count, as BLOOM does.
    """

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    lower = 2 ** math.floor(math.log2(heads))
    slopes = geometric(lower) + geometric(2 * lower)[0::2][: heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")
