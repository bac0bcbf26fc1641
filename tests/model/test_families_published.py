"""Configs of the kind that models' authors publish: old keys, odd keys, and what the values come to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pellucid_model.families import FAMILIES

COMMON = {"transformers_version": "4.40.0", "torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02}

SMOLLM2 = """{
  "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
  "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "vocab_size": 49152,
  "hidden_act": "silu", "is_llama_config": true, "rope_interleaved": false, "rope_scaling": null, "rope_theta":
  100000, "tie_word_embeddings": true, "attention_bias": false, "mlp_bias": false, "transformers.js_config":
  {"kv_cache_dtype": {"fp16": "float16"}}, "pretraining_tp": 1, "bos_token_id": 0
}"""
LLAMA_32 = """{
  "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
  "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
  "rope_theta": 500000.0, "vocab_size": 128256, "hidden_act": "silu", "eos_token_id": [128001, 128008],
  "tie_word_embeddings": true, "unsloth_fixed": true, "_attn_implementation_autoset": true, "rope_scaling":
  {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
  "rope_type": "llama3"}
}"""
QWEN_25 = """{
  "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
  "num_key_value_heads": 4, "max_position_embeddings": 32768, "max_window_layers": 28, "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": false, "use_mrope": false,
  "vocab_size": 152064, "hidden_act": "silu", "tie_word_embeddings": false, "rope_scaling": {"factor": 4.0,
  "original_max_position_embeddings": 32768, "type": "yarn"}
}"""
GPT2 = """{
  "activation_function": "gelu_new", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions":
  1024, "layer_norm_epsilon": 1e-05, "resid_pdrop": 0.1, "vocab_size": 50257, "_num_labels": 1, "n_special": 0,
  "predict_special_tokens": true, "summary_type": "cls_index", "summary_first_dropout": 0.1, "summary_use_proj":
  true, "summary_activation": null, "summary_proj_to_labels": true, "output_past": true, "task_specific_params":
  {"text-generation": {"do_sample": true, "max_length": 50}}
}"""
PYTHIA = """{
  "hidden_act": "gelu", "hidden_size": 512, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
  "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000,
  "rotary_pct": 0.25, "tie_word_embeddings": false, "use_parallel_residual": true, "vocab_size": 50304
}"""
BLOOM = """{
  "apply_residual_connection_post_layernorm": false, "attention_softmax_in_fp32": true, "n_embed": 1024,
  "bias_dropout_fusion": true, "masked_softmax_fusion": true, "n_inner": null, "n_layer": 24,
  "num_attention_heads": 16, "offset_alibi": 100, "seq_length": 2048, "skip_bias_add": true,
  "skip_bias_add_qkv": false, "layer_norm_epsilon": 1e-05, "unk_token_id": 0, "vocab_size": 250880
}"""
OPT_350M = """{
  "activation_dropout": 0.0, "activation_function": "relu", "do_layer_norm_before": false, "ffn_dim": 4096,
  "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "prefix": "</s>",
  "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50272, "word_embed_proj_dim": 512
}"""
PHI_2 = """{
  "attention_dropout": 0.0, "embd_pdrop": 0.0, "hidden_act": "gelu_new", "hidden_size": 2560,
  "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "resid_pdrop": 0.1,
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "qk_layernorm": false,
  "partial_rotary_factor": 0.4, "rope_scaling": null, "rope_theta": 10000.0, "vocab_size": 51200,
  "tie_word_embeddings": false, "auto_map": {"AutoConfig": "configuration_phi.PhiConfig"}
}"""
GEMMA = """{
  "head_dim": 256, "hidden_act": "gelu", "hidden_activation": null, "hidden_size": 2048, "intermediate_size":
  16384, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 18,
  "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "rope_scaling": null, "vocab_size":
  256000
}"""
GEMMA_3 = """{
  "attn_logit_softcapping": null, "cache_implementation": "hybrid", "final_logit_softcapping": null, "head_dim":
  256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
  "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
  "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_local_base_freq": 10000,
  "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
  "attention_bias": false
}"""


@pytest.mark.parametrize(
    ("model_type", "text", "come_to"),
    [
        ("llama", SMOLLM2, {"context_length": 8192, "head_dim": 64, "rotary_base": 1e5, "tied_head": True}),
        ("llama", LLAMA_32, {"context_length": 131072, "head_dim": 64, "rotary_base": 5e5, "rotary_scale": 1.0}),
        ("qwen2", QWEN_25, {"context_length": 131072, "windows": None, "attention_output_bias": False}),
        ("gpt2", GPT2, {"context_length": 1024, "d_ff": 3072, "tied_head": True, "activation": "gelu_tanh"}),
        ("gpt_neox", PYTHIA, {"rotary_dim": 16, "residual": "parallel", "activation": "gelu"}),
        ("bloom", BLOOM, {"context_length": 2048, "d_ff": 4096, "heads": 16, "d_model": 1024}),
        ("opt", OPT_350M, {"embedding_dim": 512, "norm_placement": "post", "final_norm": False, "d_model": 1024}),
        ("phi", PHI_2, {"rotary_dim": 32, "head_bias": True, "residual": "parallel_shared"}),
        ("gemma", GEMMA, {"embedding_scale": 45.25, "activation": "geglu_tanh", "kv_heads": 1, "head_dim": 256}),
        ("gemma3_text", GEMMA_3, {"rotary_window_base": 1e4, "rotary_base": 1e6, "attention_scale": 0.0625}),
    ],
    ids=lambda value: value if isinstance(value, str) and value in FAMILIES else "",
)
def test_published_configs_are_understood(model_type: str, text: str, come_to: dict[str, Any]) -> None:
    notices: list[str] = []
    config = FAMILIES[model_type].config(COMMON | json.loads(text), notices)
    assert not notices
    assert {name: getattr(config, name) for name in come_to} == come_to


def test_gemma_3_sees_everything_in_every_sixth_layer() -> None:
    windows = FAMILIES["gemma3_text"].config(COMMON | json.loads(GEMMA_3)).windows
    assert windows is not None
    assert [layer for layer, window in enumerate(windows) if window is None] == [5, 11, 17, 23]
