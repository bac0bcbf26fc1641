"""Command R: attention and feed-forward side by side behind one norm without bias, interleaved rotary (Cohere 2024)."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family
from pellucid_model.families.llama import LLAMA_RULES, QUERY_KEY_NORM_RULES, read_llama
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.default(tie_word_embeddings=True, rope_theta=500000.0)
    return read_llama(
        config,
        rotary_interleaved=True,
        norm="layernorm",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norm_bias=False,
        residual="parallel_shared",
        query_key_norm="per_head" if config.flag("use_qk_norm", False) else None,
        logit_scale=config.number("logit_scale", 0.0625),
    )


FAMILY = Family("cohere", _read, (*LLAMA_RULES, *QUERY_KEY_NORM_RULES), prefix="model.")
