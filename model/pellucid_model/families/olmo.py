"""OLMo: Llama with norms that have no weights (Groeneveld et al. 2024, arXiv:2402.00838)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.llama import INVERSE_FREQUENCIES, LLAMA_RULES, read_llama
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.expect("clip_qkv")
    return read_llama(config, norm="layernorm", norm_eps=1e-5, norm_weight=False)


FAMILY = Family("olmo", _read, LLAMA_RULES, prefix="model.", ignored=(INVERSE_FREQUENCIES,))
