"""The models that are measured: sizes of well-known ones, with random weights."""

from __future__ import annotations

from typing import Any

from pellucid_model.config import DecoderConfig


def _llama(**sizes: Any) -> DecoderConfig:
    return DecoderConfig(
        **sizes,
        position="rotary",
        norm="rmsnorm",
        activation="swiglu",
        attention_bias=False,
        mlp_bias=False,
        tied_head=sizes["d_model"] < 1024,
    )


SHAPES = {
    "tiny": _llama(
        vocab_size=1000, context_length=256, d_model=64, layers=2, heads=4, kv_heads=2, head_dim=16, d_ff=128
    ),
    "135M": _llama(
        vocab_size=49152, context_length=2048, d_model=576, layers=30, heads=9, kv_heads=3, head_dim=64, d_ff=1536
    ),
    "1.1B": _llama(
        vocab_size=32000, context_length=2048, d_model=2048, layers=22, heads=32, kv_heads=4, head_dim=64, d_ff=5632
    ),
    "8B": _llama(
        vocab_size=128256, context_length=8192, d_model=4096, layers=32, heads=32, kv_heads=8, head_dim=128, d_ff=14336
    ),
}
"""Of SmolLM2-135M, TinyLlama-1.1B and Llama-3-8B; "tiny" is for machines without a GPU."""


def weight_count(config: DecoderConfig) -> int:
    """Numbers in all matrices."""
    attention = config.d_model * config.head_dim * 2 * (config.heads + config.kv_heads)
    matrices = config.layers * (attention + 3 * config.d_model * config.d_ff)
    return matrices + config.vocab_size * config.d_model * (1 if config.tied_head else 2)
