"""No positions but a learned bias for each distance, in T5's buckets (Raffel et al. 2020, arXiv:1910.10683).

Short distances have a bucket each, longer ones share theirs on a logarithmic scale, and the last one counts for all
that is farther. All layers share one table, and scores are not scaled.

Serve it:  pellucid serve examples/custom_model/distance_bias.py:DistanceBias CHECKPOINT
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def buckets(count: int, farthest: int) -> Tensor:
    """[farthest + 1]: the bucket of every distance from 0 to `farthest`."""
    distance, exact = torch.arange(farthest + 1), count // 2
    share = torch.log(distance.clamp(min=1) / exact) / math.log(farthest / exact)
    logarithmic = exact + (share * (count - exact)).long()
    return torch.where(distance < exact, distance, logarithmic.clamp(max=count - 1))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))"""

    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        d_model, self.index, self.heads = config["d_model"], index, config["heads"]
        self.norm1, self.norm2 = nn.RMSNorm(d_model, eps=1e-6), nn.RMSNorm(d_model, eps=1e-6)
        self.qkv = nn.Linear(d_model, 3 * self.heads * config["head_dim"], bias=False)
        self.out = nn.Linear(self.heads * config["head_dim"], d_model, bias=False)
        self.up, self.act = nn.Linear(d_model, config["d_ff"], bias=False), nn.ReLU()
        self.down = nn.Linear(config["d_ff"], d_model, bias=False)

    def forward(self, x: Tensor, bias: Tensor, attend: Any) -> Tensor:
        """x [T, d_model], bias [heads, B] -> [T, d_model]"""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = x + self.out(attend(self.index, q, k, v, scale=1.0, distance_bias=bias).flatten(-2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class DistanceBias(nn.Module):
    """Built from the dictionary in config.json."""

    position_scheme = "distance"

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d_model, self.context_length = config["d_model"], config["context_length"]
        self.tokens = nn.Embedding(config["vocab_size"], d_model)
        self.bias = nn.Embedding(config["buckets"], config["heads"])
        self.register_buffer("bucket", buckets(config["buckets"], config["farthest"]), persistent=False)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["layers"]))
        self.norm = nn.RMSNorm(d_model, eps=1e-6)
        self.head = nn.Linear(d_model, config["vocab_size"], bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, d_model]"""
        x, bias = self.tokens(tokens), self.bias(self.bucket).T
        for layer in self.layers:
            x = layer(x, bias, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d_model] -> [R, V]"""
        return self.head(hidden)
