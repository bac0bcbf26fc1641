"""Layers in pairs: the second one asks its own queries of the first one's keys and values. Half the cache is enough.

Cross-layer attention: Brandon et al. 2024, arXiv:2405.12981. Rotary positions, one kv head for several query heads.

Serve it:  pellucid serve examples/custom_model/shared_kv.py:SharedKV CHECKPOINT
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pellucid_model.contract import Rotary


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))"""

    def __init__(self, config: dict[str, Any], index: int, rotary: Rotary) -> None:
        super().__init__()
        d_model, self.heads, self.kv_heads, self.dim = (config[k] for k in ("d_model", "heads", "kv_heads", "head_dim"))
        self.index, self.rotary, self.owner = index, rotary, index - index % 2
        self.norm1, self.norm2 = nn.RMSNorm(d_model, eps=1e-5), nn.RMSNorm(d_model, eps=1e-5)
        self.query = nn.Linear(d_model, self.heads * self.dim, bias=False)
        if self.owner == index:
            self.key_value = nn.Linear(d_model, 2 * self.kv_heads * self.dim, bias=False)
        self.out = nn.Linear(self.heads * self.dim, d_model, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, config["d_ff"]), nn.SiLU(), nn.Linear(config["d_ff"], d_model)
        )

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        """x [T, d_model] -> [T, d_model]"""
        normed = self.norm1(x)
        q = self.query(normed).unflatten(-1, (self.heads, self.dim))
        if self.owner == self.index:
            k, v = self.key_value(normed).unflatten(-1, (2, self.kv_heads, self.dim)).unbind(-3)
            mixed = attend(self.index, q, k, v, rotary=self.rotary)
        else:
            mixed = attend(self.index, q, kv_from=self.owner, rotary=self.rotary)
        x = x + self.out(mixed.flatten(-2))
        return x + self.feed_forward(self.norm2(x))


class SharedKV(nn.Module):
    """Built from the dictionary in config.json."""

    position_scheme = "rotary"

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.context_length = config["context_length"]
        self.tokens = nn.Embedding(config["vocab_size"], config["d_model"])
        rotary = Rotary.from_base(config["head_dim"], 10000.0)
        self.layers = nn.ModuleList(Layer(config, index, rotary) for index in range(config["layers"]))
        self.norm = nn.RMSNorm(config["d_model"], eps=1e-5)
        self.head = nn.Linear(config["d_model"], config["vocab_size"], bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, d_model]"""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d_model] -> [R, V]"""
        return self.head(hidden)
