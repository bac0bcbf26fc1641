"""Attention by one fused kernel: torch's varlen_attn, what it can do, and its slow twin.

The kernel (torch.nn.attention.varlen, FlashAttention-2: Dao 2023, arXiv:2307.08691) reads keys and values through block
tables from torch 2.12 on; that of 2.11 wants them laid end to end. Its limits: CUDA from compute capability 8.0 on,
bfloat16 or float16, heads of at most 256 numbers in multiples of 8, blocks of a multiple of 256 tokens where it reads
through tables, and nothing that changes a score but scale, causality and one window.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from pellucid_model.contract import AttentionOptions

BLOCK_SIZE = 256
"""Tokens of a block, and what larger blocks are a multiple of."""
LARGEST_HEAD = 256
_NEEDED = frozenset({"window_size", "scale"})
_FOR_PAGES = frozenset({"block_table", "seqused_k"})
_WHERE_KNOWN = {"enable_gqa": True, "num_splits": 1}
"""What some versions of torch want said. One split: a row's attention then does not depend on the batch."""


@dataclass(frozen=True)
class Varlen:
    """A kernel with the signature of varlen_attn, and what it is made for."""

    call: Callable[..., Tensor]
    dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})
    block_multiple: int = BLOCK_SIZE
    reads_pages: bool = True
    """Whether it reads the cache through block tables; else it is given copies of the keys and values, end to end."""

    def refuses(self, q: Tensor, cache: Tensor, options: AttentionOptions) -> str | None:
        """Why a layer cannot be computed here, as the end of "layer 3 …"; None where it can.

        q [T, Hq, D]; cache [blocks, Hkv, block_size, W]
        """
        head_dim, block_size = q.shape[-1], cache.shape[2]
        if options.alibi_slopes is not None or options.distance_bias is not None:
            return "adds a bias by distance"
        if options.softcap is not None:
            return "caps its scores"
        if q.dtype != cache.dtype or cache.dtype not in self.dtypes:
            return f"attends in {_name(q.dtype)} over a cache in {_name(cache.dtype)}"
        if head_dim > LARGEST_HEAD or head_dim % 8:
            return f"has heads of {head_dim}, not a multiple of 8 up to {LARGEST_HEAD}"
        if self.reads_pages and block_size % self.block_multiple:
            return f"has KV blocks of {block_size} tokens, not a multiple of {self.block_multiple}"
        return None


def find_varlen(device: torch.device) -> Varlen | str:
    """torch's kernel for a device; or why there is none."""
    if device.type != "cuda":
        return f"it is not made for {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} does not have it"
    return fitted(cast("Callable[..., Tensor]", varlen_attn))


def fitted(varlen_attn: Callable[..., Tensor]) -> Varlen | str:
    """torch's function with what its version wants said; or what this version cannot do."""
    known = inspect.signature(varlen_attn).parameters
    if missing := _NEEDED - known.keys():
        return f"that of torch {torch.__version__} has no {' and no '.join(sorted(missing))}"
    call = partial(varlen_attn, **{name: value for name, value in _WHERE_KNOWN.items() if name in known})
    return Varlen(call, reads_pages=known.keys() >= _FOR_PAGES)


def varlen_twin(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """varlen_attn in the textbook's form, on any device and in any dtype, for tests and for machines without a GPU.

    query        [T, Hq, D], the rows of S sequences end to end
    key, value   [blocks, block_size, Hkv, D] with a block table, else [N, Hkv, D] with the sequences' keys end to end;
                 query head h reads kv head h // (Hq / Hkv)
    cu_seq_q     int32 [S + 1], where each sequence's rows begin, and T
    cu_seq_k     int32 [S + 1], the same of its keys, as they are laid end to end, or would be
    max_q, max_k the most rows and keys of a sequence; what is longer raises ValueError
    window_size  keys before and behind a row that it sees, the last row standing at the last key; -1: all
    seqused_k    int32 [S], keys of each sequence, with a block table
    block_table  int32 [S, n]; None: there are no blocks
    returns      [T, Hq, D]
    """
    lengths = cu_seq_k.diff().tolist()
    _check_twin(cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    group = query.shape[1] // key.shape[-2]
    left, right = (size if size >= 0 else max_k for size in window_size)
    out = torch.empty_like(query)
    for sequence, length in enumerate(lengths):
        rows = slice(int(cu_seq_q[sequence]), int(cu_seq_q[sequence + 1]))
        if block_table is None:
            keys, values = (each[int(cu_seq_k[sequence]) :][:length] for each in (key, value))
        else:
            held = block_table[sequence, : -(-length // key.shape[1])].long()
            keys, values = (each[held].flatten(0, 1)[:length] for each in (key, value))
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))  # [j, Hq, D]
        scores = torch.einsum("thd,jhd->htj", query[rows].float(), keys.float()) * scale
        standing = torch.arange(length - (rows.stop - rows.start), length, device=query.device)
        distance = standing[:, None] - torch.arange(length, device=query.device)  # [t, j]
        hidden = (distance > left) | (distance < -right)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        out[rows] = torch.einsum("htj,jhd->thd", weights, values.float()).to(query.dtype)
    return out


TWIN = Varlen(varlen_twin, dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}), block_multiple=1)
"""The twin in the kernel's place, without limits that it does not have."""


def _check_twin(
    cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, seqused_k: Tensor | None, block_table: Tensor | None
) -> None:
    """What the kernel takes on trust."""
    for name, table in (("cu_seq_q", cu_seq_q), ("cu_seq_k", cu_seq_k), ("block_table", block_table)):
        if table is not None and (table.dtype != torch.int32 or table.stride(-1) != 1):
            raise ValueError(f"{name} must be int32 with adjacent elements, not {table.dtype} {table.stride()}")
    lengths = cu_seq_k.diff()
    if (seqused_k is None) != (block_table is None) or (seqused_k is not None and not torch.equal(lengths, seqused_k)):
        raise ValueError(f"cu_seq_k {cu_seq_k.tolist()} does not fit seqused_k {seqused_k}")
    if int(cu_seq_q.diff().max()) > max_q or int(lengths.max()) > max_k:
        raise ValueError(f"max_q {max_q} or max_k {max_k} is less than what the sequences have")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
