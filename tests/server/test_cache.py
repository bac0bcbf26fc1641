"""The KV cache's tensors: what lies where, and how much memory blocks take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pellucid_model.kernels import NativeKernels
from pellucid_model.kernels.cache_layout import INT8
from pellucid_model.kernels.library import supported_variants
from pellucid_server.engine.cache import KVCache, LayerShape, bytes_per_block

CPU = torch.device("cpu")
SHAPES = [LayerShape(3, 64, None), LayerShape(1, 20, 8), LayerShape(3, 64, None, kv_from=0), LayerShape(2, 64, None)]
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8])
def test_layers_lie_side_by_side_and_apart(dtype: torch.dtype, block_size: int) -> None:
    cache = KVCache(SHAPES, 5, block_size, dtype, CPU)
    stores = [each for layer in (0, 1, 3) for each in cache.layers[layer]]
    assert cache.layers[2] == cache.layers[0]
    assert {each.stride(0) * each.itemsize for each in stores} == {bytes_per_block(SHAPES, block_size, dtype)}
    for place, store in enumerate(stores):
        assert store.data_ptr() % 64 == 0
        assert store[0].is_contiguous()
        assert not store.any()
        store.fill_(place + 1)
    for place, store in enumerate(stores):
        assert (store == place + 1).all()


def test_blocks_are_copied_one_after_the_other() -> None:
    cache = KVCache(SHAPES, 5, 16, torch.float32, CPU)
    for keys, values in (cache.layers[layer] for layer in (0, 1, 3)):
        for block in range(5):
            keys[block], values[block] = block, -block
    cache.copy_blocks([(1, 2), (2, 4)])
    for keys, values in cache.layers:
        assert keys[:, 0, 0, 0].tolist() == [0, 1, 1, 3, 1]
        assert values[:, 0, 0, 0].tolist() == [0, -1, -1, -3, -1]


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no huge pages")
def test_memory_is_that_of_used_blocks() -> None:
    cache = KVCache([LayerShape(4, 64, None)] * 30, 1000, 16, torch.bfloat16, CPU)  # 480 KiB a block, 480 MiB in all
    before = _resident_kib()
    for block in range(8):
        for keys, values in cache.layers:
            keys[block], values[block] = 1, 1
    assert 3_800 <= _resident_kib() - before <= 3_840 + 2 * 2_048 + 1_024, "one huge page at each end"


@pytest.mark.skipif(not supported_variants(), reason="no compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8])
def test_kernels_find_blocks_that_lie_apart(dtype: torch.dtype) -> None:
    kernels, generator = NativeKernels(supported_variants()[0]), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, heads, 64, generator=generator) for heads in (6, 2, 2))
    own = KVCache(SHAPES, 5, 16, dtype, CPU).layers[3]
    packed = [torch.zeros(each.shape, dtype=dtype) for each in own]

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return kernels.paged_attention(
            *(q, k, v, keys, values),
            row_sequence=torch.zeros(40, dtype=torch.int32),
            positions=torch.arange(40, dtype=torch.int32),
            block_tables=torch.tensor([[3, 0, 4]], dtype=torch.int32),
            scale=0.125,
        )

    assert torch.equal(attend(*own), attend(*packed))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(own, packed, strict=True))
    with pytest.raises(ValueError, match="v_cache must be contiguous within its blocks"):
        attend(own[0], packed[1])
    with pytest.raises(ValueError, match="k_cache must be contiguous within its blocks"):
        attend(own[0].clone(memory_format=torch.channels_last), own[1])


def _resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
