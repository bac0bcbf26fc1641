"""Whole numbers for weights and activations, and how they are packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pellucid_model.kernels.packing import pack
from pellucid_model.kernels.quantization import (
    GROUP,
    IntegerFormat,
    quantize_int4,
    quantize_int8,
    round_activations,
    round_weight,
)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_int8_is_at_most_half_a_step_off() -> None:
    weight = random(20, 70)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((round_weight(weight, "int8") - weight).abs() <= step * 0.5001).all()
    codes = quantize_int8(weight).codes
    assert codes.amin() >= 1


def test_int4_is_at_most_half_a_step_off() -> None:
    weight = random(20, 70)
    padded = torch.nn.functional.pad(weight, (0, 26)).unflatten(1, (3, 32))
    step = (padded.amax(dim=2) - padded.amin(dim=2)) / 15
    error = (round_weight(weight, "int4") - weight).abs()
    # Scale and minimum are rounded to float16; fewer levels are taken only where the sum of squares gains by it.
    assert (error.square().sum() <= (step.square() / 12).sum() * 32 * 1.1).all()
    assert (error <= 0.52 * step.amax() * 15 / 8).all()


@pytest.mark.parametrize("least", [-8, 0, -3])
def test_weights_that_had_four_bits_keep_them(least: int) -> None:
    """Whatever part of the sixteen levels a group uses: GGUF's Q4_0 counts from -8, Q4_1 from a minimum of its own."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (30, 4, 32), generator=generator)
    levels = levels.minimum(torch.randint(9, 16, (30, 4, 1), generator=generator))
    scale = (torch.rand(30, 4, 1, generator=generator) + 0.1).half().float()
    weight = ((levels + least) * scale).flatten(1)
    torch.testing.assert_close(round_weight(weight, "int4"), weight, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_constant_weights(format: IntegerFormat) -> None:
    for value in (0.0, 0.75, -0.75):
        weight = torch.full((3, 64), value)
        torch.testing.assert_close(round_weight(weight, format), weight)


def test_activations() -> None:
    x = random(5, 100)
    x[1, :64] = 0
    x[2] *= 2.0**-120
    x[3, 99] = torch.nan
    x[4, 0] = -torch.inf
    rounded = round_activations(x, "int8")
    step = x[0].abs().amax() / 127
    assert ((rounded[0] - x[0]).abs() <= step * 0.5001).all()
    assert (rounded[1, :64] == 0).all()
    assert (rounded[2] == 0).all()
    assert rounded[3, 64:].isnan().all()
    assert rounded[4, :64].isnan().all()


def test_activations_in_two_digits() -> None:
    x = random(3, 100)
    x[1] *= 2.0**-120
    x[2, 99] = torch.nan
    rounded = round_activations(x, "int8", digits=2)
    assert ((rounded[0] - x[0]).abs() <= x[0].abs().amax() / (127 * 128) * 0.5001).all()
    assert (rounded[1] == 0).all()
    assert rounded[2].isnan().all()


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_weights_that_are_not_finite_are_refused(format: IntegerFormat, value: float) -> None:
    weight = random(4, 4)
    weight[2, 1] = value
    with pytest.raises(ValueError, match="weight holds a number that is not finite"):
        round_weight(weight, format)


def test_int4_refuses_what_float16_cannot_hold() -> None:
    with pytest.raises(ValueError, match="beyond 65504"):
        quantize_int4(torch.tensor([[1e5, 0.0]]))


def test_int8_panels() -> None:
    """q [K / 4][32][4], then s float32 [32]; see src/quantized_formats.h."""
    quantized, panels = quantize_int8(weight := random(40, 70)), pack(random(40, 70), "int8")
    assert panels.shape == (2, 128 * 32 + 32 * 4)
    codes = panels[:, : 128 * 32].view(2, 32, 32, 4)
    for n, k in ((0, 0), (5, 3), (31, 69), (39, 17)):
        assert codes[n // 32, k // 4, n % 32, k % 4] == quantized.codes[n, k]
    scale = panels[:, 128 * 32 :].contiguous().view(torch.float32).flatten()
    assert torch.equal(scale[:40], weight.abs().amax(dim=1) / 127)
    assert (scale[40:] == 0).all()


def test_int4_panels() -> None:
    """For each group s, m half [2][32], then q [4][32][4] with inputs 8 i … low and 8 i + 4 … high."""
    quantized, panels = quantize_int4(random(40, 70)), pack(random(40, 70), "int4")
    group_bytes = 2 * 2 * 32 + 16 * 32
    assert panels.shape == (2, 3 * group_bytes)
    groups = panels.view(2, 3, group_bytes)
    codes = groups[:, :, 128:].view(2, 3, 4, 32, 4)
    for n, k in ((0, 0), (5, 3), (5, 7), (31, 69), (39, 36)):
        byte = codes[n // 32, k // 32, k % 32 // 8, n % 32, k % 4]
        assert (byte >> (4 if k % 8 >= 4 else 0)) & 15 == quantized.codes[n, k // 32, k % 32]
    scales = groups[:, :, :128].contiguous().view(torch.float16).view(2, 3, 2, 32)
    for n, g in ((0, 0), (31, 2), (39, 1)):
        assert scales[n // 32, g, 0, n % 32] == quantized.scale[n, g]
        assert scales[n // 32, g, 1, n % 32] == quantized.minimum[n, g]


def test_groups_are_those_of_the_compiled_kernels() -> None:
    assert GROUP == {"int8": 64, "int4": 32}
