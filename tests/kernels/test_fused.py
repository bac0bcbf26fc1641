"""Linear layers with what stands before and after them: the same bits as one operator after the other."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from pellucid_model.kernels import Activation, NativeKernels, WeightFormat
from pellucid_model.kernels.fused import FusedLayer, Norm, fused_linear

ROWS = (1, 2, 6, 7, 15, 70)
INPUTS = 100


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def norms() -> list[Norm | None]:
    weight, bias = random(INPUTS), random(INPUTS + 1)[1:].clone()
    return [None, Norm("rms", 1e-5, weight), Norm("rms", 1e-6), Norm("layer", 1e-5, weight, bias), Norm("layer", 1e-5)]


def normalised(native: NativeKernels, x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    if norm.kind == "rms":
        return native.rms_norm(x, norm.weight, norm.eps)
    return native.layer_norm(x, norm.weight, norm.bias, norm.eps)


def one_by_one(native: NativeKernels, x: Tensor, layer: FusedLayer) -> Tensor:
    out = native.linear(x, layer.packed)
    if layer.gate is not None:
        assert layer.activation is not None
        out = native.activation(layer.activation, native.linear(x, layer.gate)) * out
    elif layer.activation is not None:
        out = native.activation(layer.activation, out)
    return out if layer.residual is None else layer.residual + out


@pytest.mark.parametrize("format", get_args(WeightFormat))
def test_the_same_as_one_after_the_other(native: NativeKernels, format: WeightFormat, threads: int) -> None:
    wide, narrow, gate = (
        native.pack_linear(random(outputs, INPUTS), random(outputs) if bias else None, format)
        for outputs, bias in ((200, True), (33, False), (200, True))
    )
    for norm, rows in product(norms(), ROWS):
        x = random(rows, INPUTS)
        layers = [
            FusedLayer(wide),
            FusedLayer(narrow, residual=random(rows, 33)),
            FusedLayer(wide, gate, "silu"),
            FusedLayer(wide, gate, "gelu", random(rows, 200)),
        ]
        y = normalised(native, x, norm)
        for layer, out in zip(layers, fused_linear(native, x, layers, norm), strict=True):
            assert torch.equal(out, one_by_one(native, y, layer))


@pytest.mark.parametrize("format", get_args(WeightFormat))
def test_many_long_rows_are_as_each_alone(native: NativeKernels, format: WeightFormat, threads: int) -> None:
    inputs = 1500  # a panel is longer than what stays in the nearest cache
    packed, gate = (native.pack_linear(random(70, inputs + i)[:, i:], random(70), format) for i in (0, 1))
    x, residual = random(140, inputs), random(140, 70)

    def rows(begin: int, end: int) -> list[Tensor]:
        layers = [FusedLayer(packed, gate, "silu", residual[begin:end]), FusedLayer(packed)]
        return fused_linear(native, x[begin:end], layers)

    alone = [torch.cat(each) for each in zip(*(rows(i, i + 1) for i in range(len(x))), strict=True)]
    for count in (17, 65, 140):
        assert all(torch.equal(a, b[:count]) for a, b in zip(rows(0, count), alone, strict=True))


@pytest.mark.parametrize("kind", get_args(Activation))
def test_every_activation(native: NativeKernels, kind: Activation) -> None:
    packed, gate = (native.pack_linear(random(outputs, INPUTS)[:40], None, "float32") for outputs in (40, 41))
    for rows in (1, 9):
        x = random(rows, INPUTS)
        residual = random(rows, 40)
        for layer in (
            FusedLayer(packed, activation=kind),
            FusedLayer(packed, activation=kind, residual=residual),
            FusedLayer(packed, gate, kind, residual),
        ):
            assert torch.equal(fused_linear(native, x, [layer])[0], one_by_one(native, x, layer))


def test_threads_change_no_bit(native: NativeKernels, threads: int) -> None:
    """A layer that is large enough for several, against rows alone."""
    packed, gate = (native.pack_linear(random(700, 300), None, "int8") for _ in range(2))
    x, residual = random(40, 300), random(40, 700)
    norm = Norm("rms", 1e-5)
    whole = fused_linear(native, x, [FusedLayer(packed, gate, "silu", residual)], norm)[0]
    for row in range(0, 40, 7):
        part = slice(row, row + 1)
        alone = fused_linear(native, x[part], [FusedLayer(packed, gate, "silu", residual[part])], norm)[0]
        assert torch.equal(alone, whole[part])


def test_what_does_not_fit_is_refused(native: NativeKernels) -> None:
    layer = native.pack_linear(random(8, INPUTS), None, "float32")
    other = native.pack_linear(random(8, INPUTS), None, "int8")
    x = random(2, INPUTS)
    with pytest.raises(ValueError, match="a layer of 100 inputs in float32 does not go with 4 in float32"):
        fused_linear(native, random(2, 4), [FusedLayer(layer)])
    with pytest.raises(ValueError, match="a layer of 100 inputs in int8 does not go with 100 in float32"):
        fused_linear(native, x, [FusedLayer(layer), FusedLayer(other)])
    with pytest.raises(ValueError, match="a gate must have its layer's shape and format"):
        fused_linear(native, x, [FusedLayer(layer, other, "silu")])
    with pytest.raises(ValueError, match="a gate needs an activation"):
        fused_linear(native, x, [FusedLayer(layer, layer)])
