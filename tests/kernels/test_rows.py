"""Norms and activation functions: against float64, and against themselves at every offset and length."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid_model.kernels import Function, Kernels, NativeKernels, library

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 576, 1000)

FUNCTIONS: dict[Function, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    # Written so that float64 keeps its accuracy in the tail.
    "gelu": lambda x: x * 0.5 * torch.erfc(-x / 2**0.5),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
    "silu": lambda x: x * torch.sigmoid(x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "absolute": torch.abs,
    "reciprocal": torch.reciprocal,
}
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_every_activation_is_tested() -> None:
    assert set(FUNCTIONS) == set(get_args(Function))


@pytest.mark.parametrize("size", SIZES)
def test_norms_agree_with_float64(kernels: Kernels, size: int) -> None:
    x, weight, bias = random(7, size) * 3 + 1, random(size), random(size + 1)[1:].clone()
    wide, shape = x.double(), (size,)
    rms = F.rms_norm(wide, shape, eps=1e-5)
    layer = F.layer_norm(wide, shape, eps=1e-5)
    for out, expected in (
        (kernels.rms_norm(x, None, 1e-5), rms),
        (kernels.rms_norm(x, weight, 1e-5), rms * weight),
        (kernels.layer_norm(x, None, None, 1e-5), layer),
        (kernels.layer_norm(x, weight, bias, 1e-5), layer * weight + bias),
        (kernels.layer_norm(x, None, bias, 1e-5), layer + bias),
    ):
        torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)


def test_layer_norm_of_a_large_mean(kernels: Kernels) -> None:
    x = random(3, 129) + 1000
    expected = F.layer_norm(x.double(), (129,))
    torch.testing.assert_close(kernels.layer_norm(x, None, None, 1e-5).double(), expected, rtol=0, atol=2e-4)


def test_norm_rows_do_not_touch_each_other(native: NativeKernels, threads: int) -> None:
    x, weight, bias = random(1200, 333), random(333), random(334)[:333]
    x[5, 3], x[6, 332] = torch.nan, torch.inf
    norms: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda rows: native.rms_norm(rows, weight, 1e-6),
        lambda rows: native.layer_norm(rows, weight, bias, 1e-6),
    )
    for norm in norms:
        whole = norm(x)
        alone = torch.cat([norm(x[i : i + 1]) for i in range(1200)])
        assert torch.equal(whole.nan_to_num(7.0), alone.nan_to_num(7.0))
        assert whole[5].isnan().all()
        assert whole[7:].isfinite().all()


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_activations_agree_with_float64(kernels: Kernels, kind: Function) -> None:
    x = torch.cat((torch.linspace(-20, 20, 40_001), random(1000) * 1e-3, torch.tensor([0.0, -0.0, 1e-30, -1e-30])))
    if kind in ("sqrt", "reciprocal"):
        x = x[x > 1e-20]
    expected = FUNCTIONS[kind](x.double())
    # In the far tail torch's float32 functions lose all relative accuracy; ours keep most of it.
    tail = 1e-6 if kernels.name == "torch" else 1e-9
    relative = 1e-6
    error = (kernels.activation(kind, x).double() - expected).abs()
    assert (error <= relative * expected.abs() + tail).all()


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_at_the_ends(native: NativeKernels, kind: Function) -> None:
    out = native.activation(kind, torch.tensor([torch.nan, torch.inf, -torch.inf, 1e5, -1e5, 0.0, -200.0]))
    assert out[0].isnan()
    if kind in ("gelu", "gelu_tanh", "silu"):
        return  # at infinity their product of infinity and 0 is NaN, as torch's
    expected = FUNCTIONS[kind](torch.tensor([torch.inf, -torch.inf, 1e5, -1e5, 0.0, -200.0], dtype=torch.float64))
    torch.testing.assert_close(out[1:], expected.float(), rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_at_the_ends(native: NativeKernels, kind: Function) -> None:
    x = torch.tensor([torch.nan, torch.inf, 3e38, 1e5, -1e5, -3e38])
    out = native.activation(kind, x)
    assert out[0].isnan()
    assert torch.equal(out[1:4], x[1:4])
    assert torch.equal(out[4:], torch.zeros(2))


@pytest.mark.parametrize("kind", [*ACTIVATIONS, "tanh"])
def test_offset_and_length_change_no_bit(native: NativeKernels, kind: Function, threads: int) -> None:
    x = random(300_000)
    whole = native.activation(kind, x)
    for start in range(0, 40, 3):
        for length in (*range(1, 36), 4095, 4097, 250_001):
            assert torch.equal(native.activation(kind, x[start : start + length]), whole[start : start + length])


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_avx512_and_avx2_give_the_same_bits(kind: Function) -> None:
    if not {"avx512", "avx2"} <= set(library.supported_variants()):
        pytest.skip("this CPU has no AVX-512")
    first, second = NativeKernels("avx512"), NativeKernels("avx2")
    x = torch.linspace(0 if kind == "sqrt" else -100, 100, 100_001)
    assert torch.equal(first.activation(kind, x), second.activation(kind, x))
    x, weight = random(9, 333), random(333)
    assert torch.equal(first.rms_norm(x, weight, 1e-5), second.rms_norm(x, weight, 1e-5))
    assert torch.equal(first.layer_norm(x, weight, weight, 1e-5), second.layer_norm(x, weight, weight, 1e-5))


@pytest.mark.parametrize(("count", "width"), [(1, 1), (40, 7), (97, 64), (33, 30)])
def test_tables_give_their_rows_back(kernels: Kernels, count: int, width: int) -> None:
    """As rows or as the panels of a layer, each row is what was put in, rounded to its type."""
    rows = random(count, width)
    indices = torch.randint(count, (3, 5), generator=torch.Generator().manual_seed(0))
    for format, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        expected = rows.to(dtype).float()[indices]
        shared = kernels.table_of(kernels.pack_linear(rows, None, format))  # type: ignore[arg-type]
        assert shared is not None
        assert torch.equal(kernels.look_up(indices, shared), expected)
        assert torch.equal(kernels.look_up(indices, kernels.make_table(rows, format)), expected)  # type: ignore[arg-type]
        for beyond in (-1, count):
            with pytest.raises(IndexError, match=f"outside 0 to {count} - 1"):
                kernels.look_up(torch.tensor([beyond]), shared)
    for format in ("int8", "int4"):
        assert kernels.table_of(kernels.pack_linear(rows, None, format)) is None  # type: ignore[arg-type]


def test_threads_look_up_the_same_rows(native: NativeKernels, threads: int) -> None:
    rows, indices = random(1000, 96), torch.arange(4000) * 7 % 1000
    for table in (native.make_table(rows, "bfloat16"), native.table_of(native.pack_linear(rows, None, "bfloat16"))):
        assert table is not None
        assert torch.equal(native.look_up(indices, table), rows.bfloat16().float()[indices])


def test_names_the_argument_that_does_not_fit(native: NativeKernels) -> None:
    with pytest.raises(ValueError, match=r"x must be torch\.float32"):
        native.rms_norm(random(2, 3).double(), None, 1e-5)
    with pytest.raises(ValueError, match=r"weight must be \[3\]"):
        native.rms_norm(random(2, 3), random(4), 1e-5)
    with pytest.raises(ValueError, match=r"bias must be \[3\]"):
        native.layer_norm(random(2, 3), random(3), random(2), 1e-5)


def test_unknown_activation_is_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match=r"kind must be one of relu, gelu, .*, not 'mish'"):
        kernels.activation("mish", random(3))  # type: ignore[arg-type]
