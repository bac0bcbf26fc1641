"""The paged KV cache's tensors: their shape is learnt from the model, their number of blocks from the memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid_model.contract import DecoderModel, Rotary
from pellucid_model.errors import ModelError


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps per token."""

    kv_heads: int
    head_dim: int
    window: int | None
    """The layer's own; None: it sees everything."""


class KVCache:
    """Keys and values of every layer, each [blocks, Hkv, block_size, D], so that a head's tokens lie together."""

    def __init__(
        self, shapes: list[LayerShape], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        # Zeros are handed out by the system when they are first written, so an empty cache takes no memory.
        self.layers: list[tuple[Tensor, Tensor]] = [
            (
                torch.zeros(blocks, shape.kv_heads, block_size, shape.head_dim, dtype=dtype, device=device),
                torch.zeros(blocks, shape.kv_heads, block_size, shape.head_dim, dtype=dtype, device=device),
            )
            for shape in shapes
        ]


def bytes_per_token(shapes: list[LayerShape], dtype: torch.dtype) -> int:
    """Cache bytes of one token over all layers."""
    return sum(2 * shape.kv_heads * shape.head_dim * dtype.itemsize for shape in shapes)


def native_window(shapes: list[LayerShape]) -> int:
    """The widest window where every layer has one: no row looks further back; 0 where some layer sees everything."""
    windows = [shape.window for shape in shapes if shape.window is not None]
    return max(windows) if len(windows) == len(shapes) else 0


def default_block_size(context_length: int) -> int:
    """The largest power of two <= min(128, context / 4), at least 1: few blocks to walk, little waste at the end."""
    limit = max(1, min(128, context_length // 4))
    return 1 << (limit.bit_length() - 1)


def learn_shapes(model: DecoderModel, device: torch.device) -> list[LayerShape]:
    """The cache's shape from one recorded dry forward of a single token; nothing is declared anywhere."""
    recorder = _Recorder()
    token = torch.zeros(1, dtype=torch.int64, device=device)
    model.forward(token, token, recorder)
    layers = sorted(recorder.shapes)
    if not layers or layers != list(range(len(layers))):
        raise ModelError(f"the model calls attend for layers {layers}; they must be numbered 0, 1, 2, … without gaps")
    return [recorder.shapes[layer] for layer in layers]


class _Recorder:
    """An `attend` that attends to nothing and notes what it is asked."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        rotary: Rotary | None = None,
        alibi_slopes: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if layer in self.shapes:
            raise ModelError(f"the model calls attend twice for layer {layer}; each layer has a cache of its own")
        if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
            raise ModelError(
                f"layer {layer} attends with q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: k and v must "
                "have the same shape, and q the same head_dim and a multiple of their heads"
            )
        self.shapes[layer] = LayerShape(kv_heads=k.shape[1], head_dim=k.shape[2], window=window)
        return torch.zeros_like(q)
