"""Recipes: what the two presets are, what is refused, and the learning rate they give."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from pellucid_model.errors import ModelError
from pellucid_model.training.errors import TrainingError
from pellucid_model.training.recipe import DEMO, PRESETS, STUDY_NOTE, Recipe
from pellucid_model.training.schedule import learning_rate


def test_the_study_note_is_the_study_note() -> None:
    config = STUDY_NOTE.model_config(vocab_size=1000)
    assert (config.d_model, config.heads, config.kv_heads, config.d_ff, config.layers) == (128, 8, 8, 512, 4)
    assert (config.norm, config.norm_placement, config.position) == ("layernorm", "pre", "sinusoidal")
    assert (config.activation, config.attention_bias, config.mlp_bias, config.dropout) == ("relu", True, True, 0.1)
    assert (STUDY_NOTE.layout, STUDY_NOTE.rows, STUDY_NOTE.gradient_clip, STUDY_NOTE.init_std) == (
        "padded",
        32,
        1.0,
        0.02,
    )
    assert (STUDY_NOTE.learning_rate, STUDY_NOTE.warmup) == (2e-4, 1000)


def test_the_demo_packs_a_context_of_256() -> None:
    assert (DEMO.layout, DEMO.context_length, DEMO.checkpoint_dtype) == ("packed", 256, "bfloat16")


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS.keys())
def test_a_recipe_survives_json(recipe: Recipe) -> None:
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps = 0: must be at least 1"),
        ({"rows": 0}, "rows = 0: must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0: must be above 0 and at most 1000"),
        ({"learning_rate": math.nan}, "learning_rate = nan: must be above 0 and at most 1000"),
        ({"gradient_clip": math.inf}, "gradient_clip = inf: must be a finite number of at least 0"),
        ({"warmup": -1}, "warmup = -1: must be a finite number of at least 0"),
        ({"beta2": 1.0}, "beta2 = 1.0: must be in [0, 1)"),
        ({"seed": -1}, "seed = -1: must be in [0, 2^63)"),
        (
            {"max_line_length": 255},
            "max_line_length = 255: must be between min_line_length = 4 and context_length - 2 = 254",
        ),
        ({"sample_prompts": ("\udcff",)}, "sample_prompts = ('\\udcff',): must be UTF-8 text"),
        ({"kv_heads": 3}, "config kv_heads = 3: must be a divisor of heads = 8"),
        ({"dropout": 1.0}, "config dropout = 1.0: must be in [0, 1)"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_accepted(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        dataclasses.replace(DEMO, **change)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "recipe: colour is not known"),
        ({"steps": 1.5}, "recipe: steps = 1.5 has the wrong type"),
        ({"tied_head": 1}, "recipe: tied_head = 1 has the wrong type"),
        ({"layout": "loose"}, "recipe: layout = 'loose' has the wrong type"),
        ({"sample_prompts": [1]}, "recipe: sample_prompts = (1,) has the wrong type"),
    ],
)
def test_a_recipe_is_read_strictly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError) as refused:
        Recipe.from_json({**DEMO.to_json(), **change})
    assert str(refused.value) == message


def test_a_missing_key_is_named() -> None:
    values = DEMO.to_json()
    del values["rows"]
    with pytest.raises(TrainingError, match="recipe: rows is missing"):
        Recipe.from_json(values)


def test_every_setting_is_described() -> None:
    assert list(Recipe.descriptions()) == [field.name for field in dataclasses.fields(Recipe)]


def test_the_rate_at_the_edges_of_warmup_and_cosine() -> None:
    recipe = dataclasses.replace(DEMO, steps=100, warmup=10, learning_rate=1.0, final_learning_rate=0.1)
    assert learning_rate(0, recipe) == pytest.approx(0.1)
    assert learning_rate(4, recipe) == pytest.approx(0.5)
    assert learning_rate(9, recipe) == 1.0
    assert learning_rate(10, recipe) == 1.0
    assert learning_rate(55, recipe) == pytest.approx(0.55)
    assert learning_rate(99, recipe) == pytest.approx(0.1, abs=1e-3)
    assert learning_rate(100, recipe) == pytest.approx(0.1)


def test_the_rate_without_warmup_starts_at_the_peak() -> None:
    recipe = dataclasses.replace(DEMO, steps=10, warmup=0, learning_rate=1.0)
    assert learning_rate(0, recipe) == 1.0


def test_the_rate_never_rises_after_the_warmup() -> None:
    rates = [learning_rate(step, STUDY_NOTE) for step in range(STUDY_NOTE.warmup, STUDY_NOTE.steps)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0


def test_a_warmup_longer_than_the_run_only_rises() -> None:
    recipe = dataclasses.replace(DEMO, steps=5, warmup=10, learning_rate=1.0)
    assert [learning_rate(step, recipe) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
