"""Mistral: Llama with a sliding window of the same size in every layer (Jiang et al. 2023, arXiv:2310.06825)."""

from __future__ import annotations

from dataclasses import replace

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.llama import LLAMA_RULES, read_llama
from pellucid_model.families.reader import ConfigReader

FIRST_WINDOW = 4096


def _read(config: ConfigReader) -> DecoderConfig:
    # Null is no window; a config that does not speak of it means the family's first one.
    window = config.optional_count("sliding_window") if "sliding_window" in config else FIRST_WINDOW
    read = read_llama(config)
    return replace(read, windows=(window,) * read.layers) if window else read


FAMILY = Family("mistral", _read, LLAMA_RULES, prefix="model.")
