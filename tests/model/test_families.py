"""Hugging Face families: logits as transformers computes them, in every variant that a config can ask for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pellucid_model.attention import ReferenceAttend
from pellucid_model.checkpoint import Checkpoint, load_checkpoint
from pellucid_model.families import FAMILIES
from pellucid_testing.families import CONFIGS, CONTEXT, build, edit_config, logits_of, save, some_tokens

LENGTH = 100
TOLERANCE = 1e-4
"""Of the largest |logit|, in float32."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 6, "head_dim": 8, "hidden_act": "gelu"},
        {"rms_norm_eps": 1e-2, "hidden_act": "relu"},
        *({"num_attention_heads": heads, "num_key_value_heads": kv} for heads, kv in ((4, 2), (8, 1), (6, 3))),
    ],
    "mistral": [{"sliding_window": None, "tie_word_embeddings": True}],
    "qwen2": [
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ],
    "qwen3": [
        {"attention_bias": True, "tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2},
    ],
    "gpt2": [
        {"tie_word_embeddings": False, "n_inner": None},
        *({"activation_function": act} for act in ("gelu", "relu", "silu")),
    ],
    "gpt_neox": [
        *(
            {"use_parallel_residual": parallel, "rotary_pct": share, "hidden_act": act}
            for parallel, share, act in itertools.product((True, False), (0.25, 1.0), ("gelu", "gelu_new", "gelu_fast"))
        ),
        {"attention_bias": False, "tie_word_embeddings": True, "rotary_emb_base": 500, "layer_norm_eps": 1e-2},
    ],
    "bloom": [{"n_head": 4}, {"n_head": 12, "tie_word_embeddings": False}],
    "opt": [
        {"do_layer_norm_before": False},
        {"do_layer_norm_before": False, "word_embed_proj_dim": 28, "activation_function": "gelu"},
        {"word_embed_proj_dim": 28, "tie_word_embeddings": False},
        {"enable_bias": False, "_remove_final_layer_norm": True},
        {"layer_norm_elementwise_affine": False},
    ],
    "phi": [{"qk_layernorm": True}, {"num_key_value_heads": 3, "partial_rotary_factor": 1.0, "hidden_act": "gelu"}],
    "gemma": [{"num_key_value_heads": 1, "tie_word_embeddings": False, "attention_bias": True}],
    "gptj": [{"n_inner": None, "rotary_dim": 12}],
    "stablelm": [{"use_parallel_residual": True}, {"use_qkv_bias": True, "tie_word_embeddings": True}],
    "falcon": [
        {"new_decoder_architecture": True, "num_kv_heads": 3},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"multi_query": False, "bias": True},
        {"parallel_attn": False, "tie_word_embeddings": False, "activation": "gelu_new"},
    ],
    "mpt": [{"n_heads": 4}, {"n_heads": 12, "attn_config": {"softmax_scale": 0.5}}],
    "olmo2": [{"attention_bias": True, "num_key_value_heads": 6}],
    "phi3": [{"partial_rotary_factor": 0.4, "num_key_value_heads": 6}, {"sliding_window": 9}],
    "gemma2": [{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}],
    "starcoder2": [{"use_bias": False, "sliding_window": 9, "tie_word_embeddings": False}],
    "granite": [{"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "cohere": [{"use_qk_norm": True, "attention_bias": True}],
    "cohere2": [{"attention_bias": True, "tie_word_embeddings": False}],
    "smollm3": [
        {"use_sliding_window": True, "sliding_window": 11, "no_rope_layers": [0, 1, 1], "mlp_bias": True},
        {"tie_word_embeddings": False, "attention_bias": True},
    ],
    "gemma3_text": [
        {"final_logit_softcapping": 5.0},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            }
        },
    ],
    "olmo": [{"attention_bias": True, "num_key_value_heads": 6}],
    "gpt_bigcode": [{"multi_query": False, "tie_word_embeddings": False}],
    "gpt_neo": [{"attention_types": [[["local"], 2], [["global"], 1]], "intermediate_size": None}],
    "nemotron": [{"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}],
    "glm4": [{"attention_bias": False, "partial_rotary_factor": 1.0}],
    "olmo3": [
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
                "sliding_attention": {"rope_type": "default"},
            }
        }
    ],
    "arcee": [{"mlp_bias": True, "tie_word_embeddings": True}],
}
CASES = [(name, changes) for name in CONFIGS for changes in ({}, *VARIANTS[name])]


def our_logits(checkpoint: Checkpoint, tokens: torch.Tensor) -> torch.Tensor:
    """[n] -> [n, V], in float32 through the textbook's attention."""
    positions = torch.arange(len(tokens))
    model = checkpoint.model.float()
    with torch.no_grad():
        return model.logits(model(tokens, positions, ReferenceAttend([len(tokens)], positions)))


def assert_close(have: torch.Tensor, want: torch.Tensor) -> None:
    assert want.std() >= 1
    assert (have - want).abs().max() <= TOLERANCE * want.abs().max()


def test_every_family_is_tried() -> None:
    assert set(CONFIGS) == set(VARIANTS) == {name for name in FAMILIES if name in transformers.CONFIG_MAPPING}


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_logits_equal_transformers(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    theirs = build(model_type, **changes)
    ours = load_checkpoint(save(theirs, tmp_path))
    assert (ours.architecture, ours.config.context_length, ours.notices) == (model_type, CONTEXT, ())
    tokens = some_tokens(LENGTH)
    assert_close(our_logits(ours, tokens), logits_of(theirs, tokens))


def test_variants_of_one_family_differ() -> None:
    """Else a switch that is not obeyed could go unseen. Same shapes, and so the same random weights."""
    tokens = some_tokens(LENGTH)
    same_shapes = [changes for changes in VARIANTS["gpt_neox"] if "rotary_pct" in changes]
    logits = [logits_of(build("gpt_neox", **changes), tokens) for changes in same_shapes]
    for (one, first), (other, second) in itertools.combinations(zip(same_shapes, logits, strict=True), 2):
        if {one["hidden_act"], other["hidden_act"]} != {"gelu_new", "gelu_fast"}:  # two names of one formula
            assert (first - second).abs().max() > TOLERANCE * first.abs().max()


@pytest.mark.parametrize("form", ["shards", "pickle", "pickle shards", "body alone", "wrapped"])
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bloom"])
def test_however_the_weights_are_stored(tmp_path: Path, model_type: str, form: str) -> None:
    theirs = build(model_type, tie_word_embeddings=True)
    (theirs.base_model if form == "body alone" else theirs).save_pretrained(
        tmp_path, max_shard_size="60KB" if "shards" in form else "1GB"
    )
    if "pickle" in form:
        pickled(tmp_path)
    if form == "wrapped":
        renamed(tmp_path, "_orig_mod.module.")
    files = sorted(file.name for file in tmp_path.iterdir() if file.suffix in (".bin", ".safetensors"))
    assert all(name.endswith(".bin" if "pickle" in form else ".safetensors") for name in files)
    assert len(files) > 1 if "shards" in form else len(files) == 1
    tokens = some_tokens(LENGTH)
    assert_close(our_logits(load_checkpoint(tmp_path), tokens), logits_of(theirs, tokens))


def pickled(folder: Path) -> None:
    """Turn safetensors and their index into what torch.save used to write."""
    from safetensors.torch import load_file

    for file in folder.glob("*.safetensors"):
        torch.save(load_file(file), folder / file.name.replace("model", "pytorch_model").replace("safetensors", "bin"))
        file.unlink()
    for index in folder.glob("model.safetensors.index.json"):
        text = index.read_text().replace('"model-', '"pytorch_model-').replace(".safetensors", ".bin")
        (folder / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


def renamed(folder: Path, prefix: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_masks_that_old_versions_stored_are_ignored(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for model_type, extra in (
        ("gpt2", {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.1.attn.masked_bias": None}),
        (
            "gpt_neox",
            {"gpt_neox.layers.0.attention.bias": None, "gpt_neox.layers.0.attention.rotary_emb.inv_freq": None},
        ),
        ("llama", {"model.layers.2.self_attn.rotary_emb.inv_freq": torch.ones(10)}),
    ):
        theirs = build(model_type)
        file = save(theirs, tmp_path / model_type) / "model.safetensors"
        stored = {name: torch.tensor(-1e9) if tensor is None else tensor for name, tensor in extra.items()}
        save_file(load_file(file) | stored, file)
        tokens = some_tokens(LENGTH)
        assert_close(our_logits(load_checkpoint(tmp_path / model_type), tokens), logits_of(theirs, tokens))


def test_other_names_of_the_same_keys(tmp_path: Path) -> None:
    """As older versions and the models' own authors wrote them."""
    for model_type, changes in (
        ("gpt2", {"n_ctx": CONTEXT, "n_embd": None, "hidden_size": 60, "task_specific_params": {"x": 1}}),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.25, "rotary_emb_base": 10000}),
        ("bloom", {"hidden_size": None, "n_embed": 60, "n_head": None, "num_attention_heads": 6, "offset_alibi": 100}),
        ("phi", {"rope_parameters": None, "partial_rotary_factor": 0.4, "rope_theta": 10000.0, "rope_scaling": None}),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
        ("gemma3_text", {"rope_parameters": None, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}),
        ("llama", {"rope_parameters": None, "torch_dtype": "float32", "pretraining_tp": 1}),
    ):
        theirs = build(model_type)
        folder = save(theirs, tmp_path / model_type, **changes)
        tokens = some_tokens(LENGTH)
        assert_close(our_logits(load_checkpoint(folder), tokens), logits_of(theirs, tokens))


def test_gemma_rounds_the_factor_on_embeddings_to_the_type_of_the_weights(tmp_path: Path) -> None:
    """In bfloat16, √48 = 6.928 is 6.9375; and norms, 1 + w, are not rounded at all."""
    theirs = build("gemma").bfloat16()
    loaded = load_checkpoint(save(theirs, tmp_path))
    assert loaded.config.embedding_scale == 6.9375
    assert loaded.dtype == torch.bfloat16
    stored = theirs.state_dict()["model.norm.weight"]
    assert torch.equal(loaded.model.state_dict()["final_norm.weight"], stored.float() + 1)
    edit_config(tmp_path, dtype="float32")
    assert load_checkpoint(tmp_path).config.embedding_scale == pytest.approx(48**0.5, rel=1e-7)


def test_bloom_that_does_not_say_its_context_says_so(tmp_path: Path) -> None:
    loaded = load_checkpoint(save(build("bloom"), tmp_path, seq_length=None))
    assert loaded.config.context_length == 2048
    assert "does not say the trained context" in loaded.notices[0]


def test_mistral_that_does_not_speak_of_a_window_has_its_first_one(tmp_path: Path) -> None:
    save(build("mistral"), tmp_path, sliding_window=None)
    assert load_checkpoint(tmp_path).config.windows == (4096,) * 3
