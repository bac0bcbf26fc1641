"""Qwen3: Llama whose queries and keys are normalised per head (Yang et al. 2025, arXiv:2505.09388)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.llama import LLAMA_RULES, QUERY_KEY_NORM_RULES
from pellucid_model.families.qwen2 import read_qwen
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(head_dim=128)
    return read_qwen(config, query_key_norm="head")


FAMILY = Family("qwen3", _read, (*LLAMA_RULES, *QUERY_KEY_NORM_RULES), prefix="model.")
