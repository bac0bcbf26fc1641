"""The first Transformer's order, norm(x + f(x)), and its sinusoidal positions (Vaswani et al. 2017, arXiv:1706.03762).

Serve it:  pellucid serve examples/custom_model/post_ln.py:PostLN CHECKPOINT
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def sinusoids(length: int, d_model: int) -> Tensor:
    """[length, d_model]: sines in the first half of the dimensions, cosines in the second."""
    frequencies = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


class Layer(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x))"""

    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        d_model, self.index, self.heads = config["d_model"], index, config["heads"]
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.act, self.down = nn.Linear(d_model, config["d_ff"]), nn.ReLU(), nn.Linear(config["d_ff"], d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        """x [T, d_model] -> [T, d_model]"""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = self.norm1(x + self.out(attend(self.index, q, k, v).flatten(-2)))
        return self.norm2(x + self.down(self.act(self.up(x))))


class PostLN(nn.Module):
    """Built from the dictionary in config.json. What is no weight, the table, is not stored."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d_model, self.context_length = config["d_model"], config["context_length"]
        self.tokens, self.scale = nn.Embedding(config["vocab_size"], d_model), math.sqrt(d_model)
        self.register_buffer("places", sinusoids(self.context_length, d_model), persistent=False)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["layers"]))
        self.head = nn.Linear(d_model, config["vocab_size"])

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, d_model]"""
        x = self.tokens(tokens) * self.scale + self.places[positions]
        for layer in self.layers:
            x = layer(x, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d_model] -> [R, V]"""
        return self.head(hidden)
