"""A Transformer that no configuration of Pellucid describes.

Attention and feed-forward stand side by side on one norm, every layer has a head count of its own, keys are normalised
before the dot product, and each branch has a learned scale.

Serve it:  pellucid serve examples/custom_model/my_model.py:MyTransformer CHECKPOINT
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MyBlock(nn.Module):
    """x + a · attention(norm(x)) + b · feed_forward(norm(x))"""

    def __init__(self, layer: int, d_model: int, heads: int, head_dim: int, d_ff: int) -> None:
        super().__init__()
        self.layer, self.heads, self.head_dim = layer, heads, head_dim
        self.norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * heads * head_dim, bias=False)
        self.key_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.out = nn.Linear(heads * head_dim, d_model)
        self.up, self.act, self.down = nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model)
        self.a, self.b = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        """x [T, d_model] -> [T, d_model]"""
        normed = self.norm(x)
        q, k, v = self.qkv(normed).unflatten(-1, (3, self.heads, self.head_dim)).unbind(-3)
        mixed = attend(self.layer, q, self.key_norm(k), v, scale=1.0)
        return x + self.a * self.out(mixed.flatten(-2)) + self.b * self.down(self.act(self.up(normed)))


class MyTransformer(nn.Module):
    """Built from the dictionary in config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d_model, self.context_length = config["d_model"], config["context_length"]
        self.tokens = nn.Embedding(config["vocab_size"], d_model)
        self.places = nn.Embedding(self.context_length, d_model)
        self.blocks = nn.ModuleList(
            MyBlock(layer, d_model, heads, config["head_dim"], config["d_ff"])
            for layer, heads in enumerate(config["heads"])
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, config["vocab_size"], bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, d_model]"""
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d_model] -> [R, V]"""
        return self.head(hidden)
