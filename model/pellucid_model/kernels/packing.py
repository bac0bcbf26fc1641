"""Lays weights out as the compiled kernels read them: in panels of 32 output columns, each one run of bytes.

src/linear_formats.h and src/quantized_formats.h say what a panel holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid_model.kernels.interface import WeightFormat
from pellucid_model.kernels.quantization import GROUP, quantize_int4, quantize_int8

PANEL = 32


def pack(weight: Tensor, format: WeightFormat) -> Tensor:
    """weight [N, K] -> uint8 [panels, bytes of a panel]. ValueError for numbers that the format cannot hold."""
    return _PACKERS[format](weight.detach())


def _float32(weight: Tensor) -> Tensor:
    return _steps(weight.float(), 1)


def _bfloat16(weight: Tensor) -> Tensor:
    return _steps(weight.to(torch.bfloat16), 2)


def _int8(weight: Tensor) -> Tensor:
    quantized = quantize_int8(weight)
    codes = F.pad(quantized.codes, (0, -weight.shape[1] % GROUP["int8"]))
    scale = _whole_panels(quantized.scale).view(-1, PANEL)
    return torch.cat((_steps(codes, 4), scale.view(torch.uint8)), dim=1)


def _int4(weight: Tensor) -> Tensor:
    quantized = quantize_int4(weight)
    groups = quantized.codes.shape[1]
    first, second = quantized.codes.view(-1, groups, GROUP["int4"] // 8, 2, 4).unbind(3)
    codes = _whole_panels(first | second << 4).view(-1, PANEL, groups, GROUP["int4"] // 8, 4)
    codes = codes.permute(0, 2, 3, 1, 4).flatten(2)  # [panels, G, bytes]
    scales = [_whole_panels(each).view(-1, PANEL, groups).mT for each in (quantized.scale, quantized.minimum)]
    scales_bytes = torch.cat(scales, dim=2).contiguous().view(torch.uint8)
    return torch.cat((scales_bytes, codes), dim=2).flatten(1)


_PACKERS: dict[WeightFormat, Callable[[Tensor], Tensor]] = {
    "float32": _float32,
    "bfloat16": _bfloat16,
    "int8": _int8,
    "int4": _int4,
}


def _steps(weight: Tensor, step: int) -> Tensor:
    """weight [N, K] -> [panels, K / step · 32 · step] as bytes: `step` inputs of each column lie together."""
    weight = F.pad(_whole_panels(weight), (0, -weight.shape[1] % step))
    ordered = weight.view(-1, PANEL, weight.shape[1] // step, step).transpose(1, 2)
    return ordered.flatten(1).view(torch.uint8)


def _whole_panels(x: Tensor) -> Tensor:
    """x [N, …] with zeros up to whole panels."""
    padding = -x.shape[0] % PANEL
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)) if padding else x


def check_linear_shapes(weight: Tensor, bias: Tensor | None) -> None:
    """What every implementation of pack_linear asks."""
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be [N, K], not {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], not {list(bias.shape)}")
