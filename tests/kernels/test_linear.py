"""Linear layers with packed weights: against float64, and row by row against themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pellucid_model.kernels import Kernels, NativeKernels, WeightFormat, library
from pellucid_model.kernels.quantization import IntegerFormat, round_activations, round_weight

FLOATS = (torch.float32, torch.bfloat16)
NAMES: dict[torch.dtype, WeightFormat] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
FORMATS: tuple[WeightFormat, ...] = ("float32", "bfloat16", "int8", "int4")
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65)
ROWS = (*range(1, 41), 127, 128, 129, 383, 384, 385, 700)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(kernels: Kernels, rows: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight = random(rows, inputs), random(outputs, inputs)
    bias = random(outputs) if with_bias else None
    out = kernels.linear(x, kernels.pack_linear(weight, bias, NAMES[dtype]))
    left, right = x.to(dtype).double(), weight.to(dtype).double()
    expected = left @ right.T + (0 if bias is None else bias.double())
    assert out.dtype == torch.float32
    # An error bound for sums of `inputs` products; torch also rounds the result of bfloat16 products to bfloat16.
    size = left.abs() @ right.abs().T + 1
    relative = 2**-8 if dtype == torch.bfloat16 and kernels.name == "torch" else 2**-24 * (inputs + 2)
    assert ((out.double() - expected).abs() <= relative * size).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_agrees_with_float64_at_every_edge(kernels: Kernels, dtype: torch.dtype) -> None:
    for outputs in EDGES:
        for inputs in EDGES:
            check(kernels, 5, outputs, inputs, dtype, with_bias=(outputs + inputs) % 2 == 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_agrees_with_float64_at_any_number_of_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows in ROWS:
        check(kernels, rows, 100, 70, dtype, with_bias=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_layers(kernels: Kernels, dtype: torch.dtype) -> None:
    check(kernels, 300, 1000, 257, dtype, with_bias=True)


@pytest.mark.parametrize("format", FORMATS)
def test_number_of_rows_changes_no_bit(native: NativeKernels, threads: int, format: WeightFormat) -> None:
    packed = native.pack_linear(random(200, 333), random(200), format)
    x = random(max(ROWS), 333)
    alone = torch.cat([native.linear(x[i : i + 1], packed) for i in range(len(x))])
    for rows in ROWS:
        assert torch.equal(native.linear(x[:rows], packed), alone[:rows])


@pytest.mark.parametrize("format", FORMATS)
def test_threads_change_no_bit(native: NativeKernels, format: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = native.pack_linear(random(900, 200), None, format)
    for rows in (1, 3, 20, 400, 700):
        results = []
        for count in (1, 2, 3):
            monkeypatch.setattr(library, "_threads", count)
            results.append(native.linear(random(rows, 200), packed))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("format", FORMATS)
def test_variants_give_the_same_bits(format: WeightFormat) -> None:
    """But for int8 with AMX, whose activations have two digits, and for float formats with instructions for bfloat16 or
    without fused multiply-add (portable).
    """
    unlike = {"int8": ("amx",), "int4": ()}.get(format, ("amx", "avx512-bf16", "portable"))
    names = [name for name in library.supported_variants() if name not in unlike]
    if len(names) < 2:
        pytest.skip("this CPU runs only one of the variants")
    for rows, inputs in itertools.product((1, 4, 8, 9, 12, 13, 16, 17, 33, 50), (31, 64, 96, 333, 576)):
        results = []
        for name in names:
            kernels = NativeKernels(name)
            weight = kernels.pack_linear(random(75, inputs), random(75), format)
            results.append(kernels.linear(random(rows, inputs), weight))
        for other in results[1:]:
            assert torch.equal(results[0], other)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_integers_agree_with_what_they_stand_for(kernels: Kernels, format: IntegerFormat) -> None:
    for rows, outputs, inputs in ((1, 1, 1), (5, 33, 63), (7, 64, 64), (8, 31, 65), (40, 100, 200), (300, 96, 257)):
        x, weight, bias = random(rows, inputs), random(outputs, inputs), random(outputs)
        x[0] *= 1e-6
        out = kernels.linear(x, kernels.pack_linear(weight, bias, format))
        digits = 2 if kernels.name == "amx" and format == "int8" else 1
        left = round_activations(x, format, digits=digits).double()
        right = round_weight(weight, format).double()
        size = left.abs() @ right.abs().T + bias.abs()
        assert ((out - (left @ right.T + bias)).abs() <= 2**-20 * size).all()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_integers_come_close_to_the_weights(native: NativeKernels, format: WeightFormat) -> None:
    x, weight = random(20, 640), random(50, 640)
    exact = x.double() @ weight.double().T
    error = native.linear(x, native.pack_linear(weight, None, format)) - exact
    assert error.norm() / exact.norm() < (0.015 if format == "int8" else 0.12)


def test_int8_sums_of_very_many_inputs_do_not_overflow(native: NativeKernels) -> None:
    for inputs in (2**17 - 64, 2**17, 2**17 + 64):
        weight = torch.ones(3, inputs)
        weight[1] = -1
        packed = native.pack_linear(weight, None, "int8")
        out = native.linear(torch.full((20, inputs), -0.5), packed)
        expected = torch.tensor([-1.0, 1.0, -1.0]) * 0.5 * inputs
        torch.testing.assert_close(out, expected.expand(20, 3), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("format", FORMATS)
def test_nan_stays_in_its_row(native: NativeKernels, format: WeightFormat) -> None:
    packed = native.pack_linear(random(40, 33), None, format)
    x = random(20, 33)
    clean = native.linear(x, packed)
    x[7, 32] = torch.nan
    x[8, 0] = torch.inf
    out = native.linear(x, packed)
    rest = [i for i in range(20) if i not in (7, 8)]
    assert out[7].isnan().all()
    assert not out[8].isfinite().any()
    assert torch.equal(out[rest], clean[rest])


def test_bfloat16_rounding_of_activations(native: NativeKernels) -> None:
    """Ties go to even, subnormals survive, NaN stays NaN: what torch does."""
    values = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.3895314e38, 3.4e38, torch.inf, 2.0**-130, 0.1])
    identity = native.pack_linear(torch.eye(8), None, "bfloat16")
    out = torch.stack([native.linear(torch.diag(values)[i], identity)[i] for i in range(8)])
    expected = values.bfloat16().float()
    if native.name in library.WITH_BFLOAT16:  # their instructions take subnormals for 0
        expected[6] = 0
    assert torch.equal(out, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows(kernels: Kernels, format: WeightFormat) -> None:
    assert kernels.linear(torch.empty(0, 5), kernels.pack_linear(random(3, 5), None, format)).shape == (0, 3)


def test_shapes(kernels: Kernels) -> None:
    packed = kernels.pack_linear(random(3, 5), random(3), "float32")
    assert kernels.linear(random(2, 4, 5), packed).shape == (2, 4, 3)
    assert kernels.linear(random(5), packed).shape == (3,)
    strided = random(5, 7).T
    same = torch.equal if kernels.batch_invariant else torch.allclose
    assert same(kernels.linear(strided, packed), kernels.linear(strided.contiguous(), packed))
    with pytest.raises(ValueError, match="x must be"):
        kernels.linear(random(2, 6), packed)
    with pytest.raises(ValueError, match="bias must be"):
        kernels.pack_linear(random(3, 5), random(5), "float32")
    with pytest.raises(ValueError, match="weight must be"):
        kernels.pack_linear(random(3), None, "float32")
