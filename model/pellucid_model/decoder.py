"""A decoder-only Transformer that is whatever its configuration says. The module that trains is the one that serves.

It follows the contract of `contract.py` and is written out of plain nn.Linear, nn.LayerNorm, nn.RMSNorm and activation
modules, which the serving engine swaps for its own operators.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pellucid_model.config import DecoderConfig
from pellucid_model.contract import Attend, PositionScheme, Rotary
from pellucid_model.positions import SinusoidalPositions, alibi_slopes

_SCHEMES: dict[str, PositionScheme] = {"rotary": "rotary", "alibi": "alibi", "none": "none"}


class Decoder(nn.Module):
    """tokens -> embedding (+ positions) -> blocks -> final norm -> head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.position_scheme: PositionScheme = _SCHEMES.get(config.position, "absolute")
        self.embedding = _embedding(config.vocab_size, config.d_model)
        self.position: nn.Module | None = None
        if config.position == "sinusoidal":
            self.position = SinusoidalPositions(config.context_length, config.d_model)
        elif config.position == "learned":
            self.position = _embedding(config.context_length, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.final_norm = _norm(config) if config.norm_placement == "pre" else None
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, d_model]."""
        x = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if isinstance(self.position, SinusoidalPositions):
            x = x + self.position(positions, x.dtype)
        elif self.position is not None:
            x = x + self.position(positions)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, attend)
        if self.final_norm is not None:
            x = self.final_norm(x)
        hidden: Tensor = x
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d_model] -> [R, V]."""
        logits: Tensor = self.head(hidden)
        return logits

    def initialize(self, std: float = 0.02) -> None:
        """Normal weights of the given deviation, zero biases, unit norms."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Attention and feed-forward with their residuals, normalised before (Pre-LN) or after (Post-LN)."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.pre = config.norm_placement == "pre"
        self.norm1 = _norm(config)
        self.attention = Attention(config, layer)
        self.norm2 = _norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x [T, d_model] -> [T, d_model]."""
        if self.pre:
            x = x + self.dropout(self.attention(self.norm1(x), attend))
            x = x + self.dropout(self.feed_forward(self.norm2(x)))
        else:
            x = self.norm1(x + self.dropout(self.attention(x, attend)))
            x = self.norm2(x + self.dropout(self.feed_forward(x)))
        return x


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention; what it attends over is up to `attend`."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.window = config.window(layer)
        self.softcap = config.attention_softcap
        rotary = config.position == "rotary"
        self.rotary = _shared_rotary(config) if rotary else None
        self.alibi_slopes = alibi_slopes(config.heads) if config.position == "alibi" else None
        output_bias = config.attention_output_bias
        output_bias = config.attention_bias if output_bias is None else output_bias
        self.query = nn.Linear(config.d_model, config.heads * config.head_dim, bias=config.attention_bias)
        self.key = nn.Linear(config.d_model, config.kv_heads * config.head_dim, bias=config.attention_bias)
        self.value = nn.Linear(config.d_model, config.kv_heads * config.head_dim, bias=config.attention_bias)
        self.output = nn.Linear(config.heads * config.head_dim, config.d_model, bias=output_bias)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x [T, d_model] -> [T, d_model]."""
        q = self.query(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.key(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.value(x).unflatten(-1, (self.kv_heads, self.head_dim))
        mixed = attend(
            self.layer,
            q,
            k,
            v,
            rotary=self.rotary,
            alibi_slopes=self.alibi_slopes,
            window=self.window,
            softcap=self.softcap,
        )
        out: Tensor = self.output(mixed.flatten(-2))
        return out


class FeedForward(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) for the gated kinds (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        gated = config.activation in ("swiglu", "geglu", "geglu_tanh")
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.mlp_bias) if gated else None
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.activation = _activation(config)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, d_model] -> [T, d_model]."""
        hidden = self.activation((self.up if self.gate is None else self.gate)(x))
        if self.gate is not None:
            hidden = hidden * self.up(x)
        out: Tensor = self.down(hidden)
        return out


_ROTARIES: dict[tuple[int, float, bool], Rotary] = {}


def _shared_rotary(config: DecoderConfig) -> Rotary:
    """One object for all layers with the same frequencies, so that the engine keeps one table of angles."""
    key = (config.rotary_dim, config.rotary_base, config.rotary_interleaved)
    if key not in _ROTARIES:
        _ROTARIES[key] = Rotary.from_base(*key)
    return _ROTARIES[key]


def _embedding(count: int, d_model: int) -> nn.Embedding:
    """nn.Embedding, but not initialised on the meta device: torch would import its compiler for that, for seconds."""
    weight = torch.empty(count, d_model)
    if not weight.is_meta:
        nn.init.normal_(weight)
    embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
    return embedding


def _norm(config: DecoderConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.d_model, eps=config.norm_eps)


def _activation(config: DecoderConfig) -> nn.Module:
    match config.activation:
        case "relu":
            return nn.ReLU()
        case "silu" | "swiglu":
            return nn.SiLU()
        case "gelu" | "geglu":
            return nn.GELU()
        case "gelu_tanh" | "geglu_tanh":
            return nn.GELU(approximate="tanh")
