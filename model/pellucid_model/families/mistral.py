"""Mistral: Llama with a sliding window of the same size in every layer (Jiang et al. 2023, arXiv:2310.06825)."""

from __future__ import annotations

from dataclasses import replace

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import ConfigReader, Family
from pellucid_model.families.llama import LLAMA_NAMES, read_llama

FIRST_WINDOW = 4096


def _read(config: ConfigReader) -> DecoderConfig:
    # Null is no window; a config that does not speak of it means the family's first one.
    window = config.take("sliding_window", 0) if "sliding_window" in config else FIRST_WINDOW
    read = read_llama(config)
    return replace(read, windows=(window,) * read.layers) if window else read


MISTRAL = Family(model_type="mistral", read=_read, names=LLAMA_NAMES)
