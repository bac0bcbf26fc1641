"""The layouts of the KV cache: what is written is what is read, and what the compiled kernels find there."""

from __future__ import annotations

import pytest
import torch

from pellucid_model.kernels import NativeKernels
from pellucid_model.kernels.cache_layout import INT8, CacheLayout, GranuleLayout, PlainLayout, stored_width
from pellucid_testing.paged import PagedSequences, Setup, not_a_number

BF16 = torch.bfloat16


@pytest.mark.parametrize("layout", [PlainLayout(), GranuleLayout()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, INT8], ids=str)
@pytest.mark.parametrize("dim", [1, 16, 33])
@pytest.mark.parametrize("size", [1, 2, 4, 16, 64])
def test_tokens_are_read_as_written(layout: CacheLayout, dtype: torch.dtype, dim: int, size: int) -> None:
    cache = tuple(not_a_number((5, 2, size, stored_width(dim, dtype)), dtype) for _ in range(2))
    order = torch.randperm(4 * size)  # every slot of blocks 1 to 4
    keys, values = _storable(torch.randn(2, 4 * size, 2, dim), dtype)
    layout.write((cache[0], cache[1]), 1 + order // size, order % size, keys, values)
    read = layout.read((cache[0], cache[1]), torch.tensor([[1, 2], [3, 4]]), dim)
    for new, found in zip((keys, values), read, strict=True):
        expected = torch.empty_like(new)
        expected[order] = new
        assert torch.equal(found, expected.view(2, 2, size, 2, dim))
    assert all(
        torch.equal(each[:1].view(torch.uint8), not_a_number(each[:1].shape, dtype).view(torch.uint8)) for each in cache
    )


def _storable(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers near x that a cache holds exactly."""
    if dtype != INT8:
        return x.to(dtype)
    whole = (x * 40).round().clamp(-127, 127)
    whole[..., 0] = 127
    return whole / 32


@pytest.mark.parametrize("layout", [PlainLayout(), GranuleLayout()], ids=lambda each: type(each).__name__)
def test_int8_keeps_zeros_and_tells_what_is_not_finite(layout: CacheLayout) -> None:
    cache = (
        torch.zeros(1, 1, 4, stored_width(6, INT8), dtype=INT8),
        torch.zeros(1, 1, 4, stored_width(6, INT8), dtype=INT8),
    )
    keys, values = torch.randn(2, 4, 1, 6)
    keys[0] = 0
    values[0] = 1e-38
    keys[1, 0, 5] = torch.inf
    values[2, 0, 0] = torch.nan
    layout.write(cache, torch.zeros(4, dtype=torch.int64), torch.arange(4), keys, values)
    for read, new in zip(layout.read(cache, torch.tensor([0]), 6), (keys, values), strict=True):
        assert torch.equal(read[0, 0], torch.zeros(1, 6))
        assert read[0, 1:3].isnan().all()
        assert (read[0, 3] - new[3]).abs().max() <= new[3].abs().max() / 254


@pytest.mark.parametrize("dim", [1, 16, 33])
@pytest.mark.parametrize("size", [1, 2, 64])
def test_compiled_kernels_write_the_same_bytes(native: NativeKernels, dim: int, size: int) -> None:
    setup = Setup(lengths=(70, 3), dim=dim, block_size=size, dtype=INT8)
    paged, other = PagedSequences(setup), PagedSequences(setup)
    paged.run_all(native)
    for sequence, length in enumerate(setup.lengths):
        positions = torch.arange(length)
        blocks = other.block_tables[sequence, positions // size].long()
        new = other.k[sequence], other.v[sequence]
        native.cache_layout.write((other.k_cache, other.v_cache), blocks, positions % size, *new)
    assert torch.equal(paged.k_cache, other.k_cache)
    assert torch.equal(paged.v_cache, other.v_cache)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, INT8], ids=str)
@pytest.mark.parametrize("dim", [16, 33])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_compiled_kernels_find_what_was_written(native: NativeKernels, dtype: torch.dtype, dim: int, size: int) -> None:
    setup = Setup(lengths=(70, 3), dim=dim, block_size=size, dtype=dtype)
    expected = PagedSequences(setup).run_all(native)
    paged = PagedSequences(setup)
    for sequence, length in enumerate(setup.lengths):
        positions = torch.arange(length)
        blocks = paged.block_tables[sequence, positions // size].long()
        new = paged.k[sequence], paged.v[sequence]
        native.cache_layout.write((paged.k_cache, paged.v_cache), blocks, positions % size, *new)
    assert torch.equal(paged.run(native, paged.all_rows(), write=False), expected)
