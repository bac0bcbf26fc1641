"""Foreign checkpoints that are broken or not understood: one line each, in their own words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid_model.checkpoint import load_checkpoint
from pellucid_model.errors import CheckpointError, ConfigError, ModelError
from pellucid_model.families import FAMILIES
from pellucid_testing.families import CONFIGS, build, edit_config, save


def refused(folder: Path, kind: type[ModelError]) -> str:
    with pytest.raises(kind) as error:
        load_checkpoint(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of every family."""
    return {name: save(build(name), tmp_path_factory.mktemp(name)) for name in CONFIGS}


def copied(source: Path, target: Path, tensors: Mapping[str, torch.Tensor | None], **config: Any) -> Path:
    """A copy with some tensors changed, or taken out where None."""
    kept = {**load_file(source / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    edit_config(target, **config)
    return target


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_key_that_nobody_knows_is_refused_by_every_family(
    tmp_path: Path, stored: dict[str, Path], model_type: str
) -> None:
    folder = copied(stored[model_type], tmp_path, {}, mystery_scale=3)
    assert "config keys that are not understood: mystery_scale = 3" in refused(folder, ConfigError)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_tensor_counts_in_every_family(tmp_path: Path, stored: dict[str, Path], model_type: str) -> None:
    """Whichever is missing, misshaped or not a number is named as the file names it."""
    tensors = load_file(stored[model_type] / "model.safetensors")
    names = [name for name in tensors if ".0." not in name and ".1." not in name]  # the last layer and the rest
    assert len(names) >= 8
    for name in names:
        message = refused(copied(stored[model_type], tmp_path, {name: None}), CheckpointError)
        missing = message.split("tensors are missing: ")[1].split(" or ")
        assert name in missing
        assert len(missing) == 1 or model_type in ("gpt_neox", "falcon")
    for name in names[::3]:
        longer = torch.cat((tensors[name], tensors[name][:1]))
        assert f"{name} has shape [" in refused(copied(stored[model_type], tmp_path, {name: longer}), CheckpointError)
    broken = tensors[names[-1]].clone()
    broken.view(-1)[0] = torch.nan
    message = refused(copied(stored[model_type], tmp_path, {names[-1]: broken}), CheckpointError)
    assert f"{names[-1]} has 1 values that are NaN or infinite" in message
    stranger = {"model.layers.9.stranger": torch.zeros(1)}
    assert "does not have: model.layers.9.stranger" in refused(
        copied(stored[model_type], tmp_path, stranger), CheckpointError
    )


@pytest.mark.parametrize(
    ("tied", "head", "outcome"),
    [
        (True, "absent", ""),
        (True, "same", ""),
        (True, "other", "a different head is stored"),
        (False, "same", ""),
        (False, "absent", "tensors are missing: lm_head.weight"),
    ],
)
def test_tied_and_untied_heads(tmp_path: Path, stored: dict[str, Path], tied: bool, head: str, outcome: str) -> None:
    embedding = load_file(stored["llama"] / "model.safetensors")["model.embed_tokens.weight"]
    stands = {"absent": None, "same": embedding.clone(), "other": embedding + 1}[head]
    folder = copied(stored["llama"], tmp_path, {"lm_head.weight": stands}, tie_word_embeddings=tied)
    if not tied and head == "absent":
        assert outcome in refused(folder, CheckpointError)
        return
    loaded = load_checkpoint(folder)
    assert torch.equal(loaded.model.head.weight, embedding)
    assert [outcome in notice for notice in loaded.notices] == ([True] if outcome else [])


@pytest.mark.parametrize(
    ("model_type", "changes", "says"),
    [
        ("llama", {"hidden_act": "tanh"}, "hidden_act = 'tanh': must be one of relu, silu, swish, gelu"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads = 4: must be a divisor of num_attention_heads = 6"),
        ("llama", {"vocab_size": None}, "vocab_size is missing"),
        ("llama", {"hidden_size": "48"}, "hidden_size = '48': must be a whole number from 1 to 2147483647"),
        (
            "llama",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers = 1000000000: must be a whole number from 1 to 10000",
        ),
        ("llama", {"hidden_size": True}, "hidden_size = True: must be a whole number"),
        ("llama", {"head_dim": 0}, "head_dim = 0: must be a whole number"),
        (
            "llama",
            {"head_dim": None, "num_attention_heads": 7, "num_key_value_heads": 7},
            "num_attention_heads = 7: must be a divisor",
        ),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be a finite number above 0"),
        ("llama", {"attention_bias": 1}, "attention_bias = 1: must be true or false"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full"]}, "layer_types = ['full']: must be"),
        ("gpt2", {"activation_function": "quick_gelu"}, "activation_function = 'quick_gelu': must be one of"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False is not supported for this family"),
        ("gpt2", {"n_ctx": 64}, "n_ctx = 64 contradicts n_positions = 128"),
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}, "rotary_pct = 0.5 contradicts"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm = True is not supported"),
        ("falcon", {"alibi": True}, "alibi = True is not supported"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi = False is not supported"),
        ("mpt", {"attn_config": {"alibi": True, "clip_qkv": 6}}, "clip_qkv = 6 is not supported"),
        ("mpt", {"attn_config": {"alibi": True, "sparse": 6}}, "attn_config keys that are not understood: sparse = 6"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act = 'silu' is not supported"),
    ],
)
def test_config_values_are_refused_by_name(
    tmp_path: Path, stored: dict[str, Path], model_type: str, changes: dict[str, Any], says: str
) -> None:
    folder = copied(stored[model_type], tmp_path, {}, **changes)
    message = refused(folder, ConfigError)
    assert says in message
    assert str(folder / "config.json") in message


def test_two_names_of_one_tensor_are_refused(tmp_path: Path, stored: dict[str, Path]) -> None:
    folder = copied(stored["gpt_neox"], tmp_path, {"lm_head.weight": torch.zeros(201, 72)})
    assert "embed_out.weight" in (message := refused(folder, CheckpointError))
    assert "lm_head.weight" in message
    assert "are the same tensor of the model" in message


def test_unknown_families_list_what_is_known(tmp_path: Path) -> None:
    for content in ({"model_type": "mamba"}, {"model_type": ["llama"]}, {}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        message = refused(tmp_path, ConfigError)
        assert f"model_type = {content.get('model_type')!r} is not known" in message
        assert " gpt_neox, " in message


STRANGE: tuple[Any, ...] = (
    *("x", -1, 0, 10**30, float("inf"), float("nan"), True, [], {}, [1], {"a": 1}, [[["global"], 10**9]]),
    {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 1},
    {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]},
    {"sliding_attention": 3, "full_attention": []},
)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_whatever_a_value_is_the_answer_is_one_line(stored: dict[str, Path], model_type: str) -> None:
    """Every key with every strange value: understood or refused, at once and without taking memory."""
    values = json.loads((stored[model_type] / "config.json").read_text())
    keys = {*values, "rope_scaling", "rope_theta", "rope_parameters", "layer_types", "partial_rotary_factor"} - {
        "model_type"
    }
    refusals: list[str] = []
    for key in keys:
        for strange in STRANGE:
            try:
                FAMILIES[model_type].config(values | {key: strange})
            except ConfigError as error:
                refusals.append(str(error))
    assert len(refusals) > 100
    assert not any("\n" in message for message in refusals)
