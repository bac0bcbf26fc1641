"""The layouts of the KV cache: what is written is what is read, and what the compiled kernels find there."""

from __future__ import annotations

import pytest
import torch

from pellucid_model.kernels import NativeKernels
from pellucid_model.kernels.cache_layout import CacheLayout, GranuleLayout, PlainLayout, stored_width
from pellucid_testing.paged import PagedSequences, Setup

BF16 = torch.bfloat16


@pytest.mark.parametrize("layout", [PlainLayout(), GranuleLayout()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("dim", [1, 16, 33])
@pytest.mark.parametrize("size", [1, 2, 4, 16, 64])
def test_tokens_are_read_as_written(layout: CacheLayout, dtype: torch.dtype, dim: int, size: int) -> None:
    shape = (5, 2, size, stored_width(dim, dtype))
    cache = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    order = torch.randperm(4 * size)  # every slot of blocks 1 to 4
    keys, values = torch.randn(2, 4 * size, 2, dim).to(dtype)
    layout.write(cache, 1 + order // size, order % size, keys, values)
    read = layout.read(cache, torch.tensor([[1, 2], [3, 4]]), dim)
    for new, found in zip((keys, values), read, strict=True):
        expected = torch.empty_like(new)
        expected[order] = new
        assert torch.equal(found, expected.view(2, 2, size, 2, dim))
    assert all(each[0].isnan().all() for each in cache)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
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
