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


def tiny(folder: Path, family: str = "Llama", **changes: Any) -> Any:
    """A random model of a family whose sizes never coincide, saved as transformers saves it."""
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
    config = getattr(transformers, f"{family}Config")(**(values | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero from the library, which would hide a bias that is left out
                parameter.normal_(0.0, 0.3, generator=generator)
    model.eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"num_key_value_heads": 6, "head_dim": 8}),
        ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
        ("Mistral", {"sliding_window": 13}),
        ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    theirs = tiny(tmp_path, family, **changes)
    ours = load_checkpoint(tmp_path)
    assert ours.architecture == family.lower()
    tokens = torch.randint(0, 201, (60,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(60)
    with torch.no_grad():
        want = theirs(tokens[None]).logits[0]
        have = ours.model.logits(ours.model(tokens, positions, ReferenceAttend([60], positions)))
    assert want.std() >= 1
    assert (have - want).abs().max() <= 1e-4 * want.abs().max()


def test_mistral_that_does_not_speak_of_a_window_has_its_first_one(tmp_path: Path) -> None:
    tiny(tmp_path, "Mistral", sliding_window=None)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("sliding_window") is None
    assert load_checkpoint(tmp_path).config.windows is None
    path.write_text(json.dumps(config))
    assert load_checkpoint(tmp_path).config.windows == (4096,) * 3


def test_qwen2_with_its_sliding_window_is_refused_by_name(tmp_path: Path) -> None:
    tiny(tmp_path, "Qwen2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_sliding_window": True}))
    with pytest.raises(ConfigError, match="use_sliding_window = True"):
        load_checkpoint(tmp_path)


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
    tiny(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError) as error:
        load_checkpoint(tmp_path)
    assert says in str(error.value)
