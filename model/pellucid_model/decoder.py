"""A decoder-only Transformer that is whatever its configuration says. The module that trains is the one that serves.

It follows the contract of `contract.py` and is written out of plain nn.Linear, nn.LayerNorm, nn.RMSNorm and activation
modules, which the serving engine swaps for its own operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
        width = config.embedding_dim or config.d_model
        projected = config.embedding_dim is not None
        self.embedding = _embedding(config.vocab_size, width)
        self.project_in = nn.Linear(width, config.d_model, bias=False) if projected else None
        self.embedding_norm = _norm(config, config.d_model) if config.embedding_norm else None
        self.position: nn.Module | None = None
        if config.position == "sinusoidal":
            self.position = SinusoidalPositions(config.context_length, config.d_model)
        elif config.position == "learned":
            self.position = _embedding(config.context_length, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        final = config.norm_placement != "post" if config.final_norm is None else config.final_norm
        self.final_norm = _norm(config, config.d_model) if final else None
        self.project_out = nn.Linear(config.d_model, width, bias=False) if projected else None
        self.head = nn.Linear(width, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        self.tanh = nn.Tanh()

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, d_model]."""
        x = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
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
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits: Tensor = self.head(hidden)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.config.logit_softcap is not None:
            logits = self.config.logit_softcap * self.tanh(logits / self.config.logit_softcap)
        return logits

    def initialize(self, std: float = 0.02) -> None:
        """Normal weights of the given deviation, zero biases, unit norms."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Attention and feed-forward with their norms and residuals, one after the other or side by side."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        sandwich = config.norm_placement == "sandwich"
        self.norm1 = _norm(config, config.d_model)
        self.norm1_after = _norm(config, config.d_model) if sandwich else None
        self.attention = Attention(config, layer)
        self.norm2 = _norm(config, config.d_model) if config.residual != "parallel_shared" else None
        self.norm2_after = _norm(config, config.d_model) if sandwich else None
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x [T, d_model] -> [T, d_model]."""

        def attention(x: Tensor) -> Tensor:
            mixed: Tensor = self.attention(x, attend)
            return mixed

        if self.config.residual == "sequential":
            x = self._add(x, attention, self.norm1, self.norm1_after)
            return self._add(x, self.feed_forward, self.norm2, self.norm2_after)
        normed = self.norm1(x)
        mixed = self._scaled(attention(normed))
        return x + mixed + self._scaled(self.feed_forward(normed if self.norm2 is None else self.norm2(x)))

    def _add(self, x: Tensor, part: Callable[[Tensor], Tensor], norm: Any, norm_after: Any) -> Tensor:
        """x [T, d_model] plus one part of the block, normalised where the configuration says."""
        match self.config.norm_placement:
            case "pre":
                return x + self._scaled(part(norm(x)))
            case "post":
                normed: Tensor = norm(x + self._scaled(part(x)))
                return normed
            case "output":
                return x + self._scaled(norm(part(x)))
            case "sandwich":
                return x + self._scaled(norm_after(part(norm(x))))

    def _scaled(self, x: Tensor) -> Tensor:
        scale = self.config.residual_scale
        dropped: Tensor = self.dropout(x if scale == 1.0 else x * scale)
        return dropped


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention; what it attends over is up to `attend`."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        self.window = config.window(layer)
        self.rotary = _shared_rotary(config, self.window) if config.rotates(layer) else None
        self.alibi_slopes = alibi_slopes(config.heads) if config.position == "alibi" else None
        output_bias = config.attention_output_bias
        output_bias = config.attention_bias if output_bias is None else output_bias
        self.query = nn.Linear(config.d_model, config.heads * config.head_dim, bias=config.attention_bias)
        self.key = nn.Linear(config.d_model, config.kv_heads * config.head_dim, bias=config.attention_bias)
        self.value = nn.Linear(config.d_model, config.kv_heads * config.head_dim, bias=config.attention_bias)
        self.query_norm = _head_norm(config, config.heads)
        self.key_norm = _head_norm(config, config.kv_heads)
        self.output = nn.Linear(config.heads * config.head_dim, config.d_model, bias=output_bias)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x [T, d_model] -> [T, d_model]."""
        config = self.config
        q = self.query(x).unflatten(-1, (config.heads, config.head_dim))
        k = self.key(x).unflatten(-1, (config.kv_heads, config.head_dim))
        v = self.value(x).unflatten(-1, (config.kv_heads, config.head_dim))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        mixed = attend(
            self.layer,
            q,
            k,
            v,
            scale=config.attention_scale,
            rotary=self.rotary,
            alibi_slopes=self.alibi_slopes,
            window=self.window,
            softcap=config.attention_softcap,
        )
        out: Tensor = self.output(mixed.flatten(-2))
        return out


class PerHeadNorm(nn.Module):
    """Normalises each head, x [T, H, D] -> [T, H, D], and gives each weights of its own."""

    def __init__(self, config: DecoderConfig, heads: int) -> None:
        super().__init__()
        self.norm = _norm(replace(config, norm_weight=False), config.head_dim)
        self.weight = nn.Parameter(torch.ones(heads, config.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x) * self.weight
        return normed


class AllHeadsNorm(nn.Module):
    """Normalises all heads of a token together, x [T, H, D] -> [T, H, D]."""

    def __init__(self, config: DecoderConfig, heads: int) -> None:
        super().__init__()
        self.norm = _norm(config, heads * config.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.flatten(-2)).view_as(x)
        return normed


class FeedForward(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) for the gated kinds (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        gated = config.activation in ("reglu", "swiglu", "geglu", "geglu_tanh")
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


class SquaredReLU(nn.Module):
    """relu(x)² (So et al. 2021, arXiv:2109.08668)."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        return x * x


_ROTARIES: dict[tuple[object, ...], Rotary] = {}


def _shared_rotary(config: DecoderConfig, window: int | None) -> Rotary:
    """One object for all layers with the same frequencies, so that the engine keeps one table of angles."""
    windowed = window is not None and config.rotary_window_base is not None
    base = config.rotary_window_base if windowed else config.rotary_base
    rotary = Rotary.from_base(config.rotary_dim, base or config.rotary_base, config.rotary_interleaved)
    if not windowed:
        rotary = replace(rotary, scale=config.rotary_scale)
    if not windowed and config.rotary_frequencies is not None:
        inv_freq = torch.tensor(config.rotary_frequencies, dtype=torch.float64, device="cpu")
        rotary = replace(rotary, inv_freq=inv_freq)
    key = (tuple(rotary.inv_freq.tolist()), rotary.dim, rotary.interleaved, rotary.scale)
    return _ROTARIES.setdefault(key, rotary)


def _embedding(count: int, d_model: int) -> nn.Embedding:
    """nn.Embedding, but not initialised on the meta device: torch would import its compiler for that, for seconds."""
    weight = torch.empty(count, d_model)
    if not weight.is_meta:
        nn.init.normal_(weight)
    embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
    return embedding


def _norm(config: DecoderConfig, width: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_eps, elementwise_affine=config.norm_weight)
    return nn.LayerNorm(
        width, eps=config.norm_eps, elementwise_affine=config.norm_weight, bias=config.norm_bias and config.norm_weight
    )


def _head_norm(config: DecoderConfig, heads: int) -> nn.Module | None:
    """For queries or keys [T, heads, head_dim]."""
    match config.query_key_norm:
        case None:
            return None
        case "head":
            return _norm(config, config.head_dim)
        case "per_head":
            return PerHeadNorm(config, heads)
        case "all_heads":
            return AllHeadsNorm(config, heads)


def _activation(config: DecoderConfig) -> nn.Module:
    match config.activation:
        case "relu" | "reglu":
            return nn.ReLU()
        case "relu2":
            return SquaredReLU()
        case "silu" | "swiglu":
            return nn.SiLU()
        case "gelu" | "geglu":
            return nn.GELU()
        case "gelu_tanh" | "geglu_tanh":
            return nn.GELU(approximate="tanh")
