"""Heads that talk: scores are mixed across heads before the softmax, and weights after it, so no head can be computed
by itself, and the module needs the whole score matrix (Shazeer et al. 2020, arXiv:2003.02436).

Serve it:  pellucid serve examples/custom_model/talking_heads.py:TalkingHeads CHECKPOINT
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))"""

    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        d_model, self.index, self.heads, self.dim = config["d_model"], index, config["heads"], config["head_dim"]
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * self.heads * self.dim)
        self.before = nn.Parameter(torch.eye(self.heads))
        self.after = nn.Parameter(torch.eye(self.heads))
        self.out = nn.Linear(self.heads * self.dim, d_model)
        self.up, self.act, self.down = nn.Linear(d_model, config["d_ff"]), nn.GELU(), nn.Linear(config["d_ff"], d_model)

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        """x [T, d_model] -> [T, d_model]"""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, self.dim)).unbind(-3)
        seen = attend.gathered(self.index, k, v)  # S sequences, Q queries and L keys each
        scores = torch.einsum("sqhd,skhd->shqk", seen.queries(q), seen.keys) * self.dim**-0.5
        scores = torch.einsum("shqk,hg->sgqk", scores, self.before)
        weights = scores.masked_fill(~seen.mask[:, None], -torch.inf).softmax(-1)
        weights = torch.einsum("shqk,hg->sgqk", weights, self.after)
        mixed = seen.ragged(torch.einsum("shqk,skhd->sqhd", weights, seen.values))  # [T, H, D]
        x = x + self.out(mixed.flatten(-2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class TalkingHeads(nn.Module):
    """Built from the dictionary in config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d_model, self.context_length = config["d_model"], config["context_length"]
        self.tokens = nn.Embedding(config["vocab_size"], d_model)
        self.places = nn.Embedding(self.context_length, d_model)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["layers"]))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, config["vocab_size"], bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, d_model]"""
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d_model] -> [R, V]"""
        return self.head(hidden)
