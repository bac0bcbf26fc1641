"""Arcee's AFM: Llama with an ungated feed-forward behind a squared relu (2025)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.llama import LLAMA_RULES, llama_values
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(hidden_act="relu2", rms_norm_eps=1e-5)
    return DecoderConfig(**llama_values(config, gated=False))


FAMILY = Family("arcee", _read, LLAMA_RULES, prefix="model.")
