"""Tiny random checkpoints of every shape, made in milliseconds.

Sizes never coincide (heads, kv heads, head_dim, d_ff, vocabulary), so that shapes which agree by luck hide nothing, and
weights are large enough that logits spread (standard deviation of 1 and more) and greedy output varies.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from pellucid_model.checkpoint import save_checkpoint
from pellucid_model.config import DecoderConfig
from pellucid_model.decoder import Decoder
from pellucid_model.tokenizers.character import CharacterTokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz ,.!?\n天地玄黄宇宙洪荒日月盈昃辰宿列张"
TINY = DecoderConfig(
    vocab_size=4 + len(CHARACTERS),
    context_length=128,
    d_model=40,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=12,
    d_ff=72,
    position="rotary",
)


def tiny_config(**changes: Any) -> DecoderConfig:
    """TINY with changes."""
    return dataclasses.replace(TINY, **changes)


def tiny_model(config: DecoderConfig = TINY, seed: int = 0, std: float = 0.3) -> Decoder:
    """A random model in evaluation mode; biases and norms are random too, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(center, std, generator=generator)
    return model.eval()


def tiny_checkpoint(
    folder: Path, config: DecoderConfig = TINY, *, seed: int = 0, std: float = 0.3, tokenizer: bool = True
) -> Path:
    """Write a checkpoint folder and return it. The tokenizer's table is CHARACTERS."""
    save_checkpoint(folder, tiny_model(config, seed, std))
    if tokenizer:
        CharacterTokenizer.train([CHARACTERS]).save(folder)
    return folder
