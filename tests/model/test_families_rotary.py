"""Scaled rotary embeddings: every kind, in old and new keys, within the original context and beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_model.attention import ReferenceAttend
from pellucid_model.checkpoint import load_checkpoint
from pellucid_model.errors import ConfigError
from pellucid_testing.families import CONTEXT, build, edit_config, logits_of, save, some_tokens

ORIGINAL = 32
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "low_freq_factor": 0.5},
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    {"rope_type": "yarn", **YARN, "attention_factor": 1.7},
    {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
]


def assert_equal_to_transformers(folder: Path, theirs: Any, length: int = CONTEXT - 1) -> None:
    ours = load_checkpoint(folder)
    tokens, positions = some_tokens(length), torch.arange(length)
    with torch.no_grad():
        have = ours.model.logits(ours.model(tokens, positions, ReferenceAttend([length], positions)))
    want = logits_of(theirs, tokens)
    assert want.std() >= 1
    for position in (1, 31, 50, 100, 126):
        if position < length:
            assert (have[position] - want[position]).abs().max() <= 1e-4 * want.abs().max(), position


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_logits_equal_transformers(tmp_path: Path, scaling: dict[str, Any], theta: float) -> None:
    theirs = build("llama", rope_parameters=scaling | {"rope_theta": theta})
    save(theirs, tmp_path)
    assert_equal_to_transformers(tmp_path, theirs)
    kind = scaling["rope_type"]
    old = {key: value for key, value in scaling.items() if key != "rope_type"} | {"type": kind}
    edit_config(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=None if kind == "default" else old)
    assert_equal_to_transformers(tmp_path, theirs)


def test_scalings_differ_from_one_another() -> None:
    tokens = some_tokens(CONTEXT - 1)
    logits = [logits_of(build("llama", rope_parameters=scaling), tokens)[100] for scaling in SCALINGS]
    for index, one in enumerate(logits):
        for other in logits[:index]:
            dynamic = {SCALINGS[i]["rope_type"] for i in (0, 2)}
            if dynamic != {"default", "dynamic"}:
                assert (one - other).abs().max() > 1e-2


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_scaled_share_of_the_head(tmp_path: Path, share: float) -> None:
    scaling = {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": share, "rope_theta": 500.0}
    theirs = build("gpt_neox", rope_parameters=scaling)
    assert_equal_to_transformers(save(theirs, tmp_path), theirs)


def test_dynamic_scaling_serves_the_trained_context_and_says_so(tmp_path: Path) -> None:
    save(build("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}), tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config.context_length == CONTEXT
    assert f"up to the trained context, {CONTEXT} tokens" in loaded.notices[0]


def test_yarn_extends_the_context_where_the_config_gives_the_original_one(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0}
    loaded = load_checkpoint(save(build("llama", rope_parameters=scaling), tmp_path))
    assert loaded.config.context_length == 2 * CONTEXT


def test_long_factors_are_served_up_to_the_original_context(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0]}
    theirs = build("phi3", rope_parameters={"rope_type": "longrope", **factors}, original_max_position_embeddings=64)
    save(theirs, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config.context_length == 64
    assert "64 of 128 tokens" in loaded.notices[0]
    assert_equal_to_transformers(tmp_path, theirs, length=64)
    old = {"type": "su", **factors}
    edit_config(tmp_path, rope_parameters=None, rope_theta=10000.0, rope_scaling=old)
    assert_equal_to_transformers(tmp_path, theirs, length=64)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_scaling": {"type": "foo", "factor": 2.0}}, "rope_scaling: rope_type = 'foo' is not supported"),
        ({"rope_parameters": {"rope_type": "foo"}}, "rope_parameters: rope_type = 'foo' is not supported"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type = ['yarn'] is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2': must be a finite number"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}},
            "rope_scaling keys that are not understood: beta_fast = 3",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "contradict each other"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor = 4.0: must be below high_freq_factor = 4.0",
        ),
        ({"rope_scaling": [1]}, "rope_scaling = [1]: must be an object"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta = -1.0: must be a finite number above 0"),
        ({"rope_theta": "10000"}, "rope_theta = '10000': must be a finite number above 0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling = {'type': 'linear', 'factor': 2} contradicts rope_parameters",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    save(build("llama"), tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        load_checkpoint(tmp_path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
