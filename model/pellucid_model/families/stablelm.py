"""StableLM: Llama with LayerNorm and partial rotary positions, sequential or side by side behind one norm."""

from __future__ import annotations

from pellucid_model.config import DecoderConfig
from pellucid_model.families.base import Family, Rule
from pellucid_model.families.llama import INVERSE_FREQUENCIES, LLAMA_RULES, llama_values
from pellucid_model.families.reader import ConfigReader


def _read(config: ConfigReader) -> DecoderConfig:
    config.expect("qk_layernorm", False)
    config.default(partial_rotary_factor=0.25)
    values = llama_values(config) | {
        "norm": "layernorm",
        "norm_eps": config.number("layer_norm_eps", 1e-5),
        "residual": "parallel_shared" if config.flag("use_parallel_residual", False) else "sequential",
        "attention_bias": config.flag("use_qkv_bias", False),
        "attention_output_bias": False,
    }
    return DecoderConfig(**values)


_NORM_BIASES = (
    Rule("layers.{i}.input_layernorm.bias", "blocks.{i}.norm1.bias"),
    Rule("layers.{i}.post_attention_layernorm.bias", "blocks.{i}.norm2.bias"),
    Rule("norm.bias", "final_norm.bias"),
)

FAMILY = Family("stablelm", _read, (*LLAMA_RULES, *_NORM_BIASES), prefix="model.", ignored=(INVERSE_FREQUENCIES,))
