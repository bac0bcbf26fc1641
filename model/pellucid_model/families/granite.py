"""Granite: Llama with a factor on embeddings, residuals, attention scores and logits (IBM 2024)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.llama import LLAMA_RULES, read_llama
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    return read_llama(
        config,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


FAMILY = Family("granite", _read, LLAMA_RULES, prefix="model.")
