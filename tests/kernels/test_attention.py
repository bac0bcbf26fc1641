"""Paged attention: against float64, and bit by bit against itself in every other arrangement of the same work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pellucid_model.kernels import Kernels, NativeKernels, TorchKernels, library
from pellucid_model.kernels.cache_layout import INT8
from pellucid_testing.paged import PagedSequences, Setup

BF16 = torch.bfloat16
ERRORS = {torch.float32: (4e-6, 1e-6), BF16: (2e-2, 2e-3), INT8: (4e-4, 4e-5)}
"""Of attention over what a cache holds: the largest, and their root mean square."""

SETUPS = {
    "head of 1": Setup(dim=1, block_size=1),
    "head of 8, one kv head for three": Setup(dim=8, query_heads=3, kv_heads=1, block_size=4),
    "head of 20, rotary": Setup(dim=20, rotary_dim=20, block_size=64),
    "head of 64, partial rotary": Setup(dim=64, query_heads=2, kv_heads=2, rotary_dim=16, block_size=128),
    "head of 80, interleaved rotary": Setup(dim=80, rotary_dim=32, interleaved=True),
    "head of 128, bfloat16": Setup(dim=128, query_heads=3, kv_heads=1, rotary_dim=128, dtype=BF16),
    "head of 33, bfloat16, one kv head for twenty": Setup(dim=33, query_heads=20, kv_heads=1, dtype=BF16),
    "head of 64, bfloat16": Setup(dim=64, query_heads=9, kv_heads=3, rotary_dim=64, block_size=128, dtype=BF16),
    "head of 32, bfloat16, one kv head for forty, window": Setup(
        dim=32, query_heads=40, kv_heads=1, window=37, block_size=32, dtype=BF16
    ),
    "head of 96, bfloat16, rolling": Setup(
        lengths=(300,), dim=96, query_heads=2, kv_heads=1, window=100, sinks=70, rolling=True, block_size=8, dtype=BF16
    ),
    "head of 64, bfloat16, softcap and alibi": Setup(dim=64, softcap=2.0, alibi=True, dtype=BF16),
    "alibi": Setup(alibi=True),
    "softcap": Setup(softcap=0.5),
    "bias by distance, a few columns": Setup(bias_width=5),
    "bias by distance, more columns than keys": Setup(bias_width=200, query_heads=3, kv_heads=1, softcap=2.0),
    "bias by distance, one column": Setup(bias_width=1, dtype=BF16),
    "bias by distance that hides whole key blocks": Setup(lengths=(300,), bias_width=41, bias_hides=40),
    "rolling, bias by distance": Setup(window=20, sinks=4, rolling=True, bias_width=11),
    "softcap, alibi and window": Setup(softcap=2.0, alibi=True, window=17),
    "window of 1": Setup(window=1),
    "window of 63": Setup(window=63, rotary_dim=16),
    "window of 64": Setup(window=64, block_size=4),
    "window of 65": Setup(window=65, block_size=64),
    "sinks that touch the window": Setup(window=60, sinks=4, rotary_dim=16),
    "rolling, rotary": Setup(window=20, sinks=4, rolling=True, rotary_dim=16),
    "rolling, alibi, bfloat16": Setup(window=9, sinks=3, rolling=True, alibi=True, dtype=BF16),
    "more sinks than a key block": Setup(lengths=(300,), window=100, sinks=70, rolling=True, rotary_dim=8),
    "sinks without rotation": Setup(lengths=(200, 67), window=63, sinks=1),
    "head of 1, int8": Setup(dim=1, query_heads=20, kv_heads=1, block_size=2, dtype=INT8),
    "head of 64, int8": Setup(dim=64, query_heads=9, kv_heads=3, rotary_dim=64, block_size=64, dtype=INT8),
    "head of 75, int8": Setup(dim=75, query_heads=1, kv_heads=1, block_size=4, softcap=2.0, dtype=INT8),
    "rolling, alibi, int8": Setup(dim=40, window=20, sinks=3, rolling=True, alibi=True, dtype=INT8),
}

OPTIONS = (
    "head of 20, rotary",
    "rolling, bias by distance",
    "rolling, rotary",
    "rolling, alibi, bfloat16",
    "window of 63",
    "head of 1",
    "head of 33, bfloat16, one kv head for twenty",
    "head of 128, bfloat16",
    "head of 64, bfloat16",
    "head of 32, bfloat16, one kv head for forty, window",
    "head of 1, int8",
    "head of 64, int8",
    "rolling, alibi, int8",
)


@pytest.fixture(params=SETUPS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return SETUPS[request.param]


@pytest.fixture(params=OPTIONS)
def option(request: pytest.FixtureRequest) -> Setup:
    return SETUPS[request.param]


def test_agrees_with_float64(kernels: Kernels, setup: Setup) -> None:
    paged = PagedSequences(setup)
    error = paged.run_all(kernels).double() - paged.oracle()
    # Compiled kernels round queries and weights as well: to eight bits for bfloat16, to 15 for int8.
    largest, mean = ERRORS[torch.float32 if kernels.name == "torch" else setup.dtype]
    assert error.abs().max() < largest
    assert error.square().mean().sqrt() < mean


def test_cache_holds_rotated_keys_and_values(kernels: Kernels, setup: Setup) -> None:
    paged = PagedSequences(setup)
    paged.run_all(kernels)
    error = 2**-8 if setup.dtype == BF16 else 2e-6
    for sequence, length in enumerate(setup.lengths):
        keys, values = paged.cached(sequence)
        new = paged.v[sequence].double()
        expected = paged.rotated(paged.k[sequence].double(), torch.arange(length))
        if setup.dtype == INT8:  # half a step of a scale, which is the largest of 127
            for stored, exact in ((keys, expected), (values, new)):
                assert ((stored - exact).abs() <= exact.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)).all()
            continue
        torch.testing.assert_close(keys, expected, rtol=error, atol=2e-6)
        assert torch.equal(values, new.to(setup.dtype).double())


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_change_no_bit(native: NativeKernels, option: Setup, chunk: int) -> None:
    whole = PagedSequences(option).run_all(native)
    assert torch.equal(PagedSequences(option).run_all(native, chunk), whole)


def test_neighbours_change_no_bit(native: NativeKernels, option: Setup) -> None:
    together = PagedSequences(option).run_all(native)
    paged = PagedSequences(option)
    alone = [paged.run(native, [(s, t) for t in range(length)]) for s, length in enumerate(option.lengths)]
    assert torch.equal(torch.cat(alone), together)


def test_row_order_changes_no_bit(native: NativeKernels, option: Setup) -> None:
    paged = PagedSequences(option)
    expected = paged.run_all(native)
    rows = paged.all_rows()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    out = paged.run(native, [rows[i] for i in order])
    assert torch.equal(out, expected[order])


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_one_sequence_come_in_any_order(
    native: NativeKernels, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(library, "_threads", threads)
    setup = Setup(lengths=(140,))
    expected = PagedSequences(setup).run_all(native)
    paged = PagedSequences(setup)
    rows = paged.all_rows()
    paged.run(native, rows[:100])
    assert torch.equal(paged.run(native, rows[:99:-1]), expected[100:].flip(0))


def test_block_size_changes_no_bit(native: NativeKernels, option: Setup) -> None:
    paged = PagedSequences(option)
    results = [paged.with_setup(block_size=size).run_all(native) for size in (1, 4, 16, 64, 128)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_threads_change_no_bit(native: NativeKernels, option: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(library, "_threads", threads)
        results.append(PagedSequences(option).run_all(native))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": BF16}, {"window": 400, "sinks": 200, "rolling": True, "dtype": INT8}], ids=str
)
def test_a_long_context_split_between_threads_changes_no_bit(
    native: NativeKernels, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(lengths=(700,), query_heads=3, kv_heads=1, dim=40, block_size=128, rotary_dim=40, **changes)
    paged = PagedSequences(setup)
    rows = [(0, t) for t in range(700)]
    expected = paged.run(native, rows)[-1]
    for threads in (1, 2, 3):
        monkeypatch.setattr(library, "_threads", threads)
        assert torch.equal(paged.run(native, rows[-1:])[0], expected)
    torch.testing.assert_close(expected.double(), paged.oracle()[-1], rtol=0, atol=5e-3 if changes else 4e-6)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_between_what_rows_of_one_call_see_may_be_gone(native: NativeKernels, block_size: int) -> None:
    setup = Setup(lengths=(120,), window=5, block_size=block_size)
    expected = PagedSequences(setup).run_all(native)
    paged = PagedSequences(setup)
    rows = [(0, 10), (0, 22), (0, 119)]
    paged.run_all(native)
    seen = {position // block_size for _, t in rows for position in range(t - 4, t + 1)}
    paged.block_tables[0, [b for b in range(120 // block_size) if b not in seen]] = -1
    assert torch.equal(paged.run(native, rows), expected[[t for _, t in rows]])


def test_rows_before_the_window_moves_are_plain_causal_rows(native: NativeKernels) -> None:
    rolling = PagedSequences(Setup(lengths=(150,), window=70, sinks=6, rolling=True, rotary_dim=16))
    plain = rolling.with_setup(window=0, sinks=0, rolling=False)
    first, second = rolling.run_all(native), plain.run_all(native)
    assert torch.equal(first[:76], second[:76])
    assert not torch.equal(first[76:], second[76:])


def test_avx512_and_avx2_give_the_same_bits() -> None:
    if not {"avx512", "avx2"} <= set(library.supported_variants()):
        pytest.skip("this CPU has no AVX-512")
    for setup in SETUPS.values():
        results = [PagedSequences(setup).run_all(NativeKernels(name)) for name in ("avx512", "avx2")]
        assert torch.equal(*results)


@pytest.mark.parametrize("variant", library.WITH_BFLOAT16)
def test_variants_with_bfloat16_give_the_bits_of_avx512_where_nothing_is_bfloat16(variant: str) -> None:
    if not {variant, "avx512"} <= set(library.supported_variants()):
        pytest.skip(f"this CPU has no {variant}")
    for setup in SETUPS.values():
        if setup.dtype != BF16:
            results = [PagedSequences(setup).run_all(NativeKernels(name)) for name in (variant, "avx512")]
            assert torch.equal(*results)


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_token_that_is_not_finite_reaches_who_sees_it_in_an_int8_cache(kernels: Kernels, which: str) -> None:
    setup = Setup(lengths=(40,), dim=20, window=7, block_size=8, dtype=INT8)
    clean, paged = PagedSequences(setup).run_all(kernels), PagedSequences(setup)
    getattr(paged, which)[0][11, :, 3] = torch.inf
    out = paged.run_all(kernels)
    assert out[11:18].isnan().all()
    same = torch.equal if kernels.batch_invariant else torch.allclose
    assert same(out[18:], clean[18:])
    assert same(out[:11], clean[:11])


@pytest.mark.parametrize(("dim", "dtype"), [(24, torch.float32), (24, BF16), (64, BF16)])
def test_nan_reaches_only_rows_that_see_it(kernels: Kernels, dim: int, dtype: torch.dtype) -> None:
    setup = Setup(lengths=(40, 90), dim=dim, window=30, block_size=16, dtype=dtype)
    clean = PagedSequences(setup).run_all(kernels)
    paged = PagedSequences(setup)
    for tensor in (paged.q, paged.k, paged.v):
        tensor[1][5] = torch.nan
    out = paged.run_all(kernels)
    spoiled = torch.zeros(130, dtype=torch.bool)
    spoiled[40 + 5 : 40 + 5 + 30] = True
    assert out[spoiled].isnan().all()
    same = torch.equal if kernels.batch_invariant else torch.allclose
    assert same(out[~spoiled], clean[~spoiled])


def test_blocks_that_the_window_left_may_be_gone(native: NativeKernels) -> None:
    setup = Setup(lengths=(200,), window=40, sinks=3, rolling=True, rotary_dim=16)
    expected = PagedSequences(setup).run_all(native)
    paged = PagedSequences(setup)
    for t in range(200):
        gone = [b for b in range(t // 16) if 16 * b + 15 < t - 39 and b > 0]
        paged.k_cache[paged.block_tables[0, gone].long()] = torch.nan
        paged.block_tables[0, gone] = -1
        assert torch.equal(paged.run(native, [(0, t)])[0], expected[t])


def test_without_keys_the_rows_attend_over_what_is_cached(kernels: Kernels) -> None:
    """As a layer does that reads another one's keys and values."""
    paged = PagedSequences(Setup(rotary_dim=16, window=30))
    out = paged.run_all(kernels)
    before = paged.k_cache.clone(), paged.v_cache.clone()
    assert torch.equal(paged.run(kernels, paged.all_rows(), write=False), out)
    assert torch.equal(paged.k_cache.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(paged.v_cache.nan_to_num(), before[1].nan_to_num())


def test_no_rows(kernels: Kernels) -> None:
    paged = PagedSequences(Setup())
    none = torch.empty(0, dtype=torch.int32)
    nothing = (paged.q[0][:0], paged.k[0][:0], paged.v[0][:0])
    caches = (paged.k_cache, paged.v_cache)
    out = kernels.paged_attention(
        *nothing, *caches, row_sequence=none, positions=none, block_tables=paged.block_tables, scale=1.0
    )
    assert out.shape == (0, 4, 16)


def test_torch_kernels_take_any_float_type() -> None:
    for dtype, error in ((torch.float64, 1e-6), (torch.float16, 2e-2), (BF16, 2e-1)):
        paged = PagedSequences(Setup(dtype=dtype, rotary_dim=16, alibi=True, window=60, sinks=3))
        for tensors in (paged.q, paged.k, paged.v):
            tensors[:] = [tensor.to(dtype) for tensor in tensors]
        out = paged.run_all(TorchKernels())
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), paged.oracle(), rtol=0, atol=error)


@pytest.mark.parametrize("scale", [1e4, 1e9, 1e-30, 0.0, -0.3, -1e9])
def test_any_scale_agrees(kernels: Kernels, scale: float) -> None:
    paged = PagedSequences(Setup())
    paged.scale = scale
    out = paged.run_all(kernels)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), paged.oracle(), rtol=0, atol=2e-2)


@pytest.mark.parametrize("scale", [1e4, 1e9, 1e-30, 0.0, 1.0, -1e9])
@pytest.mark.parametrize("hides", [0, 40])
def test_any_scale_stays_finite_in_bfloat16(kernels: Kernels, scale: float, hides: int) -> None:
    """Where scores are huge, rounding decides which is the largest, but a row is still a mean of values."""
    bias_width = hides + 1 if hides else 0
    paged = PagedSequences(Setup(lengths=(300,), dim=64, dtype=BF16, bias_width=bias_width, bias_hides=hides))
    paged.scale = scale
    out = paged.run_all(kernels)
    assert out.isfinite().all()
    assert out.abs().max() <= 1.01 * torch.stack([each.abs().max() for each in paged.v]).max()


def _break_positions(paged: PagedSequences, arguments: dict[str, Any]) -> None:
    arguments["positions"][0] = 144


def _break_sequence(paged: PagedSequences, arguments: dict[str, Any]) -> None:
    arguments["row_sequence"][0] = 5


def _break_table(paged: PagedSequences, arguments: dict[str, Any]) -> None:
    paged.block_tables[3, 0] = -1


def _break_type(paged: PagedSequences, arguments: dict[str, Any]) -> None:
    arguments["positions"] = arguments["positions"].long()


def _break_bias(paged: PagedSequences, arguments: dict[str, Any]) -> None:
    arguments["distance_bias"] = torch.zeros(4, 0)


def _break_block_size(paged: PagedSequences, arguments: dict[str, Any]) -> None:
    paged.k_cache, paged.v_cache = (torch.zeros(30, 2, 24, 16) for _ in range(2))


def _break_window(paged: PagedSequences, arguments: dict[str, Any]) -> None:
    arguments["window"] = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_break_positions, "positions"),
        (_break_sequence, "row_sequence"),
        (_break_table, "block_tables"),
        (_break_type, "positions"),
        (_break_window, "window"),
        (_break_bias, "distance_bias"),
        (_break_block_size, "24"),
    ],
)
def test_names_the_argument_that_does_not_fit(
    native: NativeKernels, spoil: Callable[[PagedSequences, dict[str, Any]], None], named: str
) -> None:
    paged = PagedSequences(Setup())
    paged.run_all(native)
    arguments: dict[str, Any] = {
        "row_sequence": torch.tensor([3], dtype=torch.int32),
        "positions": torch.tensor([20], dtype=torch.int32),
    }
    spoil(paged, arguments)
    row = (paged.q[3][20:21], paged.k[3][20:21], paged.v[3][20:21])
    with pytest.raises(ValueError, match=named):
        native.paged_attention(
            *row, paged.k_cache, paged.v_cache, block_tables=paged.block_tables, scale=1.0, **arguments
        )
