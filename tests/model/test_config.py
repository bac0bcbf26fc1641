"""Configurations are read strictly: what is not understood is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pellucid_model.config import DecoderConfig
from pellucid_model.errors import ConfigError
from pellucid_testing.checkpoints import TINY, tiny_config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "learned", "norm": "rmsnorm", "norm_placement": "post", "activation": "geglu"},
        {"windows": (None, 8), "attention_softcap": 30.0, "attention_output_bias": False},
        {"rotary_fraction": 0.5, "rotary_interleaved": True, "embedding_scale": 6.5},
        {"rotary_frequencies": (1.0, 0.5, 0.25, 0.1, 0.05, 0.0), "rotary_scale": 1.3, "rotary_layers": (True, False)},
        {"query_key_norm": "per_head", "residual": "parallel", "final_norm": False, "embedding_dim": 7},
    ],
)
def test_round_trip_through_json(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    assert DecoderConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_heads": 4}, "kv_heads = 4: must be a divisor of heads = 6"),
        ({"layers": 0}, "layers = 0: must be from 1 to 10000"),
        ({"d_ff": 1 << 31}, "d_ff = 2147483648: must be from 1 to 2147483647"),
        ({"rotary_fraction": 0.3}, "rotary_fraction = 0.3: must be such that an even number"),
        ({"rotary_base": float("nan")}, "rotary_base = nan: must be a finite number above 0"),
        ({"dropout": 1.0}, "dropout = 1.0: must be in"),
        ({"windows": (8,)}, "windows = (8,): must be one per layer (2)"),
        ({"windows": (8, 0)}, "windows = 0: must be null or at least 1"),
        ({"position": "sinusoidal", "d_model": 41}, "d_model = 41: must be even"),
        ({"attention_softcap": 0.0}, "attention_softcap = 0.0: must be a finite number above 0"),
        ({"embedding_dim": 0}, "embedding_dim = 0: must be a finite number above 0"),
        ({"logit_scale": float("inf")}, "logit_scale = inf: must be a finite number above 0"),
        ({"rotary_frequencies": (1.0,)}, "rotary_frequencies = (1.0,): must be one number, 0 or more, for each of 6"),
        ({"rotary_frequencies": (-1.0,) * 6}, "rotary_frequencies"),
        ({"rotary_layers": (True,)}, "rotary_layers = (True,): must be one per layer (2)"),
        ({"residual": "parallel", "norm_placement": "post"}, "residual = 'parallel': must be sequential unless"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_config(**changes)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"colour": "red"}, "colour = 'red'"),
        ({"norm": "batchnorm"}, "norm = 'batchnorm': must be one of 'layernorm', 'rmsnorm'"),
        ({"heads": "six"}, "heads = 'six': must be of type int"),
        ({"heads": True}, "heads = True: must be of type int"),
        ({"heads": 6.0}, "heads = 6.0: must be of type int"),
        ({"tied_head": 1}, "tied_head = 1: must be of type bool"),
        ({"windows": [1, "x"]}, "windows = 'x': must be of type int"),
        ({"windows": 4}, "windows = 4: must be a list"),
        ({"rotary_layers": [1, 0]}, "rotary_layers = 1: must be of type bool"),
        ({"residual": "twice"}, "residual = 'twice': must be one of 'sequential', 'parallel', 'parallel_shared'"),
        ({"norm": ["rmsnorm"]}, "norm = ('rmsnorm',): must be one of"),
        ({"architecture": "bert"}, "architecture = 'bert'"),
    ],
)
def test_json_that_is_not_understood_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        DecoderConfig.from_json(TINY.to_json() | changes)
    assert says in str(error.value)


def test_missing_key_is_named() -> None:
    values = TINY.to_json()
    del values["d_ff"]
    with pytest.raises(ConfigError, match="d_ff"):
        DecoderConfig.from_json(values)
    with pytest.raises(ConfigError, match="architecture"):
        DecoderConfig.from_json({})
