"""Weights and activations as small whole numbers: what the integer kernels compute with, written out in torch.

    int8  a weight is (code - 128) * scale, with one scale for each output; code is 1 to 255
    int4  a weight is code * scale + minimum, with both for each output and group of 32 inputs; code is 0 to 15

Activations are quantized as they come, each row in groups of 64 (int8) or 32 (int4) inputs: whole numbers from -127 to
127 times one scale for each group, its largest absolute value / 127. In int8 with AMX they are whole numbers from
-16256 to 16256 times one scale for each row.

Sixteen levels between a group's least and largest weight reproduce weights that were quantized to 4 bits before (GGUF's
Q4_0 and Q4_1): where fewer levels fit the group better, they are taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

IntegerFormat = Literal["int8", "int4"]

GROUP: dict[IntegerFormat, int] = {"int8": 64, "int4": 32}
"""Inputs that share a scale of activations, and in int4 of weights."""
TWO_DIGITS = 127 * 128
"""The largest activation of int8 with AMX: 128 times a digit plus another one."""
_LEVELS = range(15, 7, -1)
_SMALLEST = 2.0**-100
"""Activations below it count as 0, so that 127 / x is finite."""


@dataclass(frozen=True, eq=False)
class Int8Weight:
    codes: Tensor
    """[N, K] uint8."""
    scale: Tensor
    """[N] float32."""


@dataclass(frozen=True, eq=False)
class Int4Weight:
    codes: Tensor
    """[N, G, 32] uint8, inputs padded to whole groups."""
    scale: Tensor
    """[N, G] float16."""
    minimum: Tensor
    """[N, G] float16."""


def quantize_int8(weight: Tensor) -> Int8Weight:
    """weight [N, K]. ValueError where it is not finite."""
    weight = _finite(weight, torch.finfo(torch.float32).max)
    scale = weight.abs().amax(dim=1) / 127
    codes = (weight / scale.where(scale > 0, 1)[:, None]).round().clamp(-127, 127) + 128
    return Int8Weight(codes.to(torch.uint8), scale)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """weight [N, K]. ValueError where it is not finite, or beyond what float16 holds."""
    weight = _finite(weight, torch.finfo(torch.float16).max)
    outputs, inputs = weight.shape
    group = GROUP["int4"]
    groups = -(-inputs // group)
    codes = torch.empty(outputs, groups, group, dtype=torch.uint8)
    scale, minimum = (torch.empty(outputs, groups, dtype=torch.float16) for _ in range(2))
    rows = max(1, 2**18 // (groups * group))  # at a time, so that what is in between stays in the cache
    for start in range(0, outputs, rows):
        part = slice(start, start + rows)
        padded = F.pad(weight[part], (0, groups * group - inputs))
        codes[part], scale[part], minimum[part] = _fit(padded.unflatten(1, (groups, group)))
    return Int4Weight(codes, scale, minimum)


def _finite(weight: Tensor, bound: float) -> Tensor:
    weight = weight.detach().float()
    if not bool((weight.abs() <= bound).all()):
        raise ValueError(f"weight holds a number that is not finite or beyond {bound:g}")
    return weight


def _fit(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [n, G, 32] -> codes, scale, minimum, of the number of levels whose squared error is least."""
    low, high = weight.aminmax(dim=2)
    minimum = low.half()
    scale, least = torch.zeros_like(minimum), torch.full_like(low, torch.inf)
    for levels in _LEVELS:
        candidate = ((high - low) / levels).half()
        error = (_dequantize(_codes(weight, candidate, minimum), candidate, minimum) - weight).square_().sum(dim=2)
        scale, least = candidate.where(error < least, scale), error.minimum(least)
    return _codes(weight, scale, minimum), scale, minimum


def _codes(weight: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    inverse = (1 / scale.float()).where(scale > 0, 0)
    return ((weight - minimum.float()[..., None]) * inverse[..., None]).round_().clamp_(0, 15).byte()


def _dequantize(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    weight: Tensor = codes * scale.float()[..., None] + minimum.float()[..., None]
    return weight


def round_weight(weight: Tensor, format: IntegerFormat) -> Tensor:
    """The weight [N, K] that the kernels compute with, as float32."""
    if format == "int8":
        int8 = quantize_int8(weight)
        return (int8.codes.float() - 128) * int8.scale[:, None]
    int4 = quantize_int4(weight)
    return _dequantize(int4.codes, int4.scale, int4.minimum).flatten(1)[:, : weight.shape[1]]


def round_activations(x: Tensor, format: IntegerFormat, *, digits: int = 1) -> Tensor:
    """x [..., K] as the kernels see it. A row with a number that is not finite becomes NaN.

    digits  2: in int8 with AMX
    """
    inputs = x.shape[-1]
    group, most = (GROUP[format], 127) if digits == 1 else (inputs, TWO_DIGITS)
    grouped = F.pad(x, (0, -inputs % group)).unflatten(-1, (-1, group))
    largest = grouped.abs().amax(dim=-1, keepdim=True)
    known = largest.isfinite() & (largest >= _SMALLEST)
    codes = (grouped * (torch.full_like(largest, most) / largest)).round().where(known, 0)
    scale = (largest / most).where(largest.isfinite(), torch.nan).where(known | ~largest.isfinite(), 0)
    rounded: Tensor = (codes * scale).flatten(-2)[..., :inputs]
    return rounded
