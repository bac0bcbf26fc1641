"""What is done to stored tensors so that they are ours. Each takes a weight [out, in] or a bias [out]; see Rule."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Change

QKV = tuple(f"blocks.{{i}}.attention.{name}.{{kind}}" for name in ("query", "key", "value"))
"""Our names for what a fused projection comes apart into."""
GATE_UP = tuple(f"blocks.{{i}}.feed_forward.{name}.{{kind}}" for name in ("gate", "up"))


def transposed(tensor: Tensor, config: DecoderConfig) -> Sequence[Tensor]:
    """Weights kept as [in, out]; a bias is left alone."""
    return [tensor.t().contiguous()]


def qkv_one_after_another(tensor: Tensor, config: DecoderConfig) -> Sequence[Tensor]:
    """All heads of q, then all of k, then all of v."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts: tuple[Tensor, ...] = tensor.split([q, kv, kv])
    return parts


def qkv_one_after_another_transposed(tensor: Tensor, config: DecoderConfig) -> Sequence[Tensor]:
    """The same, kept as [in, out]."""
    return qkv_one_after_another(tensor.t().contiguous(), config)


def qkv_by_kv_head(tensor: Tensor, config: DecoderConfig) -> Sequence[Tensor]:
    """For each kv head its query heads, its k, its v; where every head has its own, that is q, k, v head by head."""
    size = config.head_dim
    groups = tensor.unflatten(0, (config.kv_heads, -1))  # [Hkv, (Hq / Hkv + 2) · D, …]
    parts = groups.split([groups.shape[1] - 2 * size, size, size], dim=1)
    return [part.flatten(0, 1) for part in parts]


def gate_then_up(tensor: Tensor, config: DecoderConfig) -> Sequence[Tensor]:
    """The two halves of a gated feed-forward."""
    halves: tuple[Tensor, ...] = tensor.split(config.d_ff)
    return halves


def plus_one(tensor: Tensor, config: DecoderConfig) -> Sequence[Tensor]:
    """Norm weights that are stored as what they differ from 1; in float32, since 1 + w is not exact in less."""
    return [tensor.float() + 1.0]


def without_first_rows(count: int) -> Change:
    """A position table whose first rows are never used."""
    return lambda tensor, config: [tensor[count:]]
