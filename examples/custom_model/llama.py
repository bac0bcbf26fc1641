"""Llama's block as a file of one's own, tensor by tensor what Pellucid's configurable decoder makes of the same folder.

So one folder serves both ways, and loadtest/own_module.py compares their speed.

Serve it:  pellucid serve examples/custom_model/llama.py:Llama CHECKPOINT
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pellucid_model.contract import Rotary


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any], layer: int, rotary: Rotary) -> None:
        super().__init__()
        d_model, self.dim = config["d_model"], config["head_dim"]
        self.layer, self.rotary = layer, rotary
        self.query = nn.Linear(d_model, config["heads"] * self.dim, bias=False)
        self.key = nn.Linear(d_model, config["kv_heads"] * self.dim, bias=False)
        self.value = nn.Linear(d_model, config["kv_heads"] * self.dim, bias=False)
        self.output = nn.Linear(config["heads"] * self.dim, d_model, bias=False)

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        """x [T, d_model] -> [T, d_model]"""
        q, k, v = (part(x).unflatten(-1, (-1, self.dim)) for part in (self.query, self.key, self.value))
        return self.output(attend(self.layer, q, k, v, rotary=self.rotary).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.gate = nn.Linear(config["d_model"], config["d_ff"], bias=False)
        self.up = nn.Linear(config["d_model"], config["d_ff"], bias=False)
        self.activation = nn.SiLU()
        self.down = nn.Linear(config["d_ff"], config["d_model"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, d_model] -> [T, d_model]"""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any], layer: int, rotary: Rotary) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config["d_model"], eps=config["norm_eps"])
        self.attention = Attention(config, layer, rotary)
        self.norm2 = nn.RMSNorm(config["d_model"], eps=config["norm_eps"])
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        """x [T, d_model] -> [T, d_model]"""
        x = x + self.attention(self.norm1(x), attend)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """Built from the dictionary in config.json."""

    position_scheme = "rotary"

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.context_length = config["context_length"]
        self.embedding = nn.Embedding(config["vocab_size"], config["d_model"])
        rotary = Rotary.from_base(config["head_dim"], config["rotary_base"])
        self.blocks = nn.ModuleList(Block(config, layer, rotary) for layer in range(config["layers"]))
        self.final_norm = nn.RMSNorm(config["d_model"], eps=config["norm_eps"])
        self.head = nn.Linear(config["d_model"], config["vocab_size"], bias=False)
        if config["tied_head"]:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, d_model]"""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, attend)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d_model] -> [R, V]"""
        return self.head(hidden)
