"""What the fused kernel is told of a batch, through its slow twin in its place; and what it is not asked for."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from pellucid_model.contract import AttentionOptions
from pellucid_server.engine.decode_steps import Bucket
from pellucid_server.engine.flash import FlashBatch, window_size
from pellucid_server.engine.loading import choose_block_size
from pellucid_server.engine.ragged import RaggedBatch, RollingWindows
from pellucid_server.engine.varlen import TWIN, Varlen, find_varlen, fitted, varlen_twin

CPU = torch.device("cpu")
HALF = torch.bfloat16
PLAIN = AttentionOptions(scale=0.25)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch_of(*chunks: tuple[int, int], rolling: RollingWindows | None = None) -> RaggedBatch:
    """A chunk (start, count) of each sequence, with blocks of four tokens that lie backwards."""
    tables = [[90 - 10 * s - b for b in range(3)] + [-1] for s in range(len(chunks))]
    positions = [t for start, count in chunks for t in range(start, start + count)]
    rows = [s for s, (_, count) in enumerate(chunks) for _ in range(count)]
    last = torch.tensor([count for _, count in chunks]).cumsum(0) - 1
    return RaggedBatch(
        torch.zeros(len(rows), dtype=torch.int64),
        torch.tensor(positions),
        int32(*rows),
        torch.tensor(tables, dtype=torch.int32),
        last,
        rolling,
    )


def test_batch_says_where_rows_lie() -> None:
    host = batch_of((5, 4), (0, 1), (2, 1))
    batch = FlashBatch.of(host, host, block_size=4)
    assert batch.blocks.tolist() == [89, 89, 89, 88, 80, 70]
    assert batch.slots.tolist() == [1, 2, 3, 0, 0, 2]
    assert batch.row_bounds.tolist() == [0, 4, 5, 6]
    assert batch.lengths.tolist() == [9, 1, 3]
    assert batch.key_bounds.tolist() == [0, 9, 10, 13]
    assert (batch.most_rows, batch.most_keys) == (4, 9)
    assert batch.block_tables.min() == 0, "a kernel takes -1 for an address"


def test_keys_can_be_copied_end_to_end() -> None:
    host = batch_of((5, 4), (0, 1), (2, 1))
    batch = FlashBatch.of(host, host, block_size=4)
    blocks, slots = batch.key_places
    assert blocks.tolist() == [90] * 4 + [89] * 4 + [88] + [80] + [70] * 3
    assert slots.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 1, 2]
    single = FlashBatch.of_single_rows(torch.tensor([8, 0, 2]), batch.block_tables, block_size=4)
    assert (len(single.key_places[0]), single.all_keys) == (48, 48)
    for have, want in zip(single.key_places, (blocks, slots), strict=True):
        assert torch.equal(have[:13], want), "the rest is there because a graph's sizes are fixed"


def test_single_rows_are_the_same_batch() -> None:
    host = batch_of((6, 1), (0, 1), (11, 1))
    batch = FlashBatch.of(host, host, block_size=4)
    single = FlashBatch.of_single_rows(host.positions, batch.block_tables, block_size=4)
    for name in ("blocks", "slots", "row_bounds", "key_bounds", "lengths", "positions"):
        assert torch.equal(getattr(batch, name), getattr(single, name)), name
        assert getattr(batch, name).dtype == getattr(single, name).dtype, name
    assert single.most_keys == 16, "fixed, whatever the positions"


def test_a_bucket_is_filled_anew_for_every_step() -> None:
    bucket = Bucket(4, width=6, spare_block=99, block_size=4, device=CPU)
    for chunks in (((6, 1), (0, 1), (11, 1)), ((2, 1),)):
        host = batch_of(*chunks)
        bucket.fill(host)
        _, batch = bucket.inputs()
        count = len(chunks)
        assert batch.positions.tolist() == [*host.positions.tolist(), *[0] * (4 - count)]
        assert batch.blocks[count:].tolist() == [99] * (4 - count)
        assert torch.equal(batch.block_tables[:count, :4], host.block_tables.clamp(min=0))
        assert (batch.block_tables[:count, 4:] == 99).all(), "wide enough, and never -1"


def rolling(*windows: int, sinks: int = 0) -> RollingWindows:
    return RollingWindows(int32(*windows), int32(*[sinks if window else 0 for window in windows]), int32())


@pytest.mark.parametrize(
    ("host", "own", "want"),
    [
        (batch_of((0, 9), (3, 1)), None, (-1, 0)),
        (batch_of((8, 1), (3, 1)), None, (-1, -1)),  # single rows see all that there is
        (batch_of((0, 9), (3, 1)), 4, (3, 0)),
        (batch_of((0, 3), (2, 1)), 4, (-1, 0)),  # not passed yet
        (batch_of((0, 9), (3, 1), rolling=rolling(6, 6)), None, (5, 0)),
        (batch_of((0, 9), (6, 1), rolling=rolling(6, 0)), None, None),  # the second one sees all of its 7
        (batch_of((0, 9), (5, 1), rolling=rolling(6, 0)), None, (5, 0)),
        (batch_of((0, 9), (3, 1), rolling=rolling(6, 6, sinks=2)), None, None),
        (batch_of((0, 8), (3, 1), rolling=rolling(6, 6, sinks=2)), None, (-1, 0)),  # sinks and window are all
        (batch_of((0, 9), (8, 1), rolling=rolling(6, 7)), None, None),
        (batch_of((0, 9), (8, 1), rolling=rolling(6, 7, sinks=1)), 4, (3, 0)),  # a layer's own has no sinks
        (batch_of((0, 9), (8, 1), rolling=rolling(3, 0)), 4, None),
    ],
)
def test_window_size(host: RaggedBatch, own: int | None, want: tuple[int, int] | None) -> None:
    batch = FlashBatch.of(host, host, block_size=4)
    assert batch.window_size(own) == want
    assert window_size(host, batch.lengths, own, decoding=batch.most_rows == 1) == want


def test_blocks_are_what_the_kernel_reads() -> None:
    cuda = torch.device("cuda")
    assert choose_block_size(0, 1 << 20, cuda) == choose_block_size(0, 40, cuda) == 256
    assert choose_block_size(16, 1 << 20, cuda) == 16
    assert choose_block_size(0, 1 << 20, CPU) == 128


def test_refusals_say_why() -> None:
    kernel = Varlen(varlen_twin)
    q, cache = torch.zeros(1, 4, 64, dtype=HALF), torch.zeros(1, 2, 256, 64, dtype=HALF)
    assert kernel.refuses(q, cache, PLAIN) is None
    assert kernel.refuses(q.half(), cache.half(), PLAIN) is None
    assert kernel.refuses(q, cache, PLAIN._replace(window=7)) is None
    for options in ({"alibi_slopes": torch.ones(4)}, {"distance_bias": torch.ones(4, 1)}, {"softcap": 5.0}):
        assert kernel.refuses(q, cache, PLAIN._replace(**options))
    for width, size, dtype in ((60, 256, HALF), (264, 256, HALF), (64, 128, HALF), (64, 256, torch.float32)):
        q, cache = torch.zeros(1, 4, width, dtype=dtype), torch.zeros(1, 2, size, width, dtype=dtype)
        assert kernel.refuses(q, cache, PLAIN)
    assert "bfloat16" in str(kernel.refuses(q.float(), cache.to(HALF), PLAIN))


def test_versions_of_torch_are_told_what_they_know() -> None:
    def old(query: Tensor, key: Tensor, *, scale: float, window_size: tuple[int, int]) -> Tensor:
        return query

    def sparse(q: Tensor, *, scale: float, window_size: object, seqused_k: object, block_table: object) -> Tensor:
        return q

    def older(query: Tensor, key: Tensor, *, is_causal: bool) -> Tensor:
        return query

    assert "has no scale and no window_size" in str(fitted(older))
    packing, kernel = fitted(old), fitted(sparse)
    assert isinstance(packing, Varlen)
    assert isinstance(kernel, Varlen)
    assert (packing.reads_pages, kernel.reads_pages) == (False, True)
    assert kernel.call(q := torch.ones(1), scale=1.0, window_size=0, seqused_k=0, block_table=0) is q
    assert packing.refuses(torch.zeros(1, 4, 64, dtype=HALF), torch.zeros(1, 2, 16, 64, dtype=HALF), PLAIN) is None
    assert "cpu" in str(find_varlen(CPU))


@pytest.mark.parametrize("how", ["torch's", "the twin"])
def test_the_call_is_one_that_torch_takes(how: str) -> None:
    """torch's function on tensors without memory: it looks at names, types and heads, and computes nothing."""
    kernel = fitted(cast("Any", varlen_attn)) if how == "torch's" else TWIN
    assert isinstance(kernel, Varlen)
    device = "meta" if how == "torch's" else "cpu"
    host = batch_of((5, 4), (0, 1))
    batch = FlashBatch.of(host, host, block_size=4)
    cache = torch.zeros(91, 2, 4, 16, dtype=HALF).to(device)
    tensors = (batch.row_bounds.to(device), batch.key_bounds.to(device))
    out = kernel.call(
        torch.zeros(5, 6, 16, dtype=HALF).to(device),
        cache.transpose(1, 2),
        cache.transpose(1, 2),
        *tensors,
        batch.most_rows,
        batch.most_keys,
        scale=0.25,
        window_size=(-1, 0),
        seqused_k=batch.lengths.to(device),
        block_table=batch.block_tables.to(device),
    )
    assert out.shape == (5, 6, 16)
    assert out.dtype == HALF
