"""Modules from files of their own: what loads, and what is refused with one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid_model.errors import ModelError
from pellucid_model.servable import Servable, load_servable
from pellucid_testing.checkpoints import tiny_checkpoint
from pellucid_testing.custom_model import CONFIG, EXAMPLE, custom_checkpoint

SMALL = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config["vocab_size"], 8)
        self.head = nn.Linear(8, config["vocab_size"], bias=False)
        self.head.weight = self.tokens.weight
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens, positions, attend):
        x = self.tokens(tokens)
        return x + attend(0, *[self.mix(x)[:, None]] * 3)[:, 0]

    def logits(self, hidden):
        return self.head(hidden)
"""


def small(folder: Path, code: str = SMALL, **config: Any) -> tuple[Path, str]:
    """A checkpoint of Small, and the file's source string; `code` may break either."""
    (folder / "small.py").write_text(code)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 11} | config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"tokens.weight": (11, 8), "mix.weight": (8, 8), "mix.bias": (8,)}
    save_file({name: torch.randn(s, generator=generator) for name, s in shapes.items()}, folder / "model.safetensors")
    return folder, f"{folder / 'small.py'}:Small"


def refusal(folder: Path, source: str) -> str:
    with pytest.raises(ModelError) as error:
        load_servable(folder, source)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_alone_is_what_its_config_says(tmp_path: Path) -> None:
    servable = load_servable(tiny_checkpoint(tmp_path))
    assert (servable.architecture, servable.context_length, servable.custom) == ("pellucid.decoder", 128, False)


def test_the_example_loads_strictly(tmp_path: Path) -> None:
    servable = load_servable(custom_checkpoint(tmp_path), EXAMPLE)
    assert (servable.vocab_size, servable.context_length) == (CONFIG["vocab_size"], CONFIG["context_length"])
    assert (servable.architecture, servable.position_scheme, servable.custom) == ("MyTransformer", "absolute", True)
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in servable.module.state_dict().items():
        assert torch.equal(tensor, stored[name])
    assert len(Path(EXAMPLE.rpartition(":")[0]).read_text().splitlines()) < 100


def weight(servable: Servable) -> torch.Tensor:
    tensor: torch.Tensor = servable.module.state_dict()["mix.weight"]
    return tensor


def test_tied_tensors_and_the_prefixes_of_wrappers(tmp_path: Path) -> None:
    folder, source = small(tmp_path)
    servable = load_servable(folder, source)
    state = servable.module.state_dict(keep_vars=True)
    assert state["head.weight"] is state["tokens.weight"]
    assert servable.context_length is None
    tensors = load_file(folder / "model.safetensors")
    for prefix in ("_orig_mod.", "module.", "module._orig_mod."):
        save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
        assert torch.equal(weight(load_servable(folder, source)), tensors["mix.weight"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("class Small", "class Other", "has no nn.Module of the name 'Small'"),
        ("def logits", "def not_logits", "Small has no method logits"),
        ("import torch\n", "import nothing_of_the_kind\n", "ModuleNotFoundError: No module named"),
        ('config["vocab_size"], 8)', 'config["width"], 8)', "cannot be built from config.json: KeyError: 'width'"),
        ("self.mix = nn.Linear(8, 8)", "self.mix = nn.Linear(8, 9)", "mix.bias has shape [8], but the module's is [9]"),
        ("self.mix = nn.Linear", "self.blend = nn.Linear", "tensors are missing: blend.bias, blend.weight"),
        ("nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False)", "tensors that the module does not have: mix.bias"),
        ("return self.head(hidden)", "return self.head(hidden)[0]", "logits [11], not [1, d] and [1, V]"),
        ("return self.head(hidden)", "return self.head(hidden.T)", "breaks the contract"),
        (
            "class Small(nn.Module):",
            "class Small(nn.Module):\n    position_scheme = 'relative'",
            "'relative'; accepted:",
        ),
        ("class Small(nn.Module):", "class Small(nn.Module):\n    context_length = 0.5", "context_length = 0.5"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in SMALL
    folder, source = small(tmp_path, SMALL.replace(old, new))
    assert says in refusal(folder, source)


def test_a_file_that_is_not_there_and_a_folder_that_is_empty(tmp_path: Path) -> None:
    folder, source = small(tmp_path)
    assert "there is no file" in refusal(folder, "nowhere.py:Small")
    assert "config.json is missing" in refusal(tmp_path / "nowhere", source)
