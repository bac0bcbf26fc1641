"""Hugging Face checkpoints: logits as transformers computes them, and configs that are not understood refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_model.attention import ReferenceAttend
from pellucid_model.checkpoint import load_checkpoint
from pellucid_model.errors import ConfigError

transformers = pytest.importorskip("transformers")


def llama(folder: Path, **changes: Any) -> Any:
    """A random Llama whose sizes never coincide, saved as transformers saves it."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 201,
        "hidden_size": 48,
        "intermediate_size": 104,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "max_position_embeddings": 96,
        "initializer_range": 0.3,
        "rope_theta": 5000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(values | changes))).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 6, "head_dim": 8},
        {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    ],
)
def test_llama_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = llama(tmp_path, **changes)
    ours = load_checkpoint(tmp_path)
    assert ours.architecture == "llama"
    tokens = torch.randint(0, 201, (60,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(60)
    with torch.no_grad():
        want = theirs(tokens[None]).logits[0]
        have = ours.model.logits(ours.model(tokens, positions, ReferenceAttend([60], positions)))
    assert want.std() >= 1
    assert (have - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "foo"}}, "rope_type = 'foo'"),
        ({"mystery_scale": 3}, "mystery_scale = 3"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_config_that_is_not_understood_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    llama(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError) as error:
        load_checkpoint(tmp_path)
    assert says in str(error.value)
