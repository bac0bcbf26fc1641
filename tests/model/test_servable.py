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
        ("import torch\n", "import sys\nsys.exit('no model')\n", "cannot be run: SystemExit: no model"),
        ('config["vocab_size"], 8)', 'config["width"], 8)', "cannot be built from its config: KeyError: 'width'"),
        ("self.mix = nn.Linear(8, 8)", "self.mix = nn.Linear(8, 9)", "mix.bias has shape [8], but the module's is [9]"),
        ("self.mix = nn.Linear", "self.blend = nn.Linear", "tensors are missing: blend.bias, blend.weight"),
        ("nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False)", "tensors that the module does not have: mix.bias"),
        ("return self.head(hidden)", "return self.head(hidden)[0]", "logits gives [11] for one row, not [1, V]"),
        ("return self.head(hidden)", "return None", "logits gives a NoneType for one row"),
        ("return self.head(hidden)", "return self.head(hidden).long()", "logits gives torch.int64"),
        ("* 3)[:, 0]", "* 3)", "forward gives [1, 1, 8] for one token, not hidden"),
        ("attend(0, *", "attend(1, *", "calls attend for layers [1]; they must be numbered 0, 1, 2"),
        ("attend(0, *", "attend('0', *", "layer = '0'; accepted: 0, 1, 2, …"),
        ("attend(0, *", "attend(0, *[self.mix(x)[:, None]] * 3)[:, 0] + attend(0, *", "attend twice for layer 0"),
        ("attend(0, *", "attend(0, window=0, *", "layer 0: window = 0; accepted: a number of tokens, 1 or more"),
        ("attend(0, *", "attend(0, softcap=-1.0, *", "layer 0: softcap = -1.0; accepted: a number above 0"),
        ("attend(0, *", "attend(0, alibi_slopes=torch.ones(3), *", "alibi_slopes is [3]; accepted: [1], one per head"),
        ("attend(0, *", "attend(0, distance_bias=torch.ones(1, 0), *", "distance_bias is [1, 0]; accepted: [1, B]"),
        ("attend(0, *[self.mix(x)[:, None]] * 3)", "attend(0, self.mix(x)[:, None], kv_from=0)", "no earlier layer 0"),
        (
            "attend(0, *[self.mix(x)[:, None]] * 3)",
            "attend(0, self.mix(x)[:, None], x[:, None, :4], x[:, None, :4])",
            "layer 0 attends with q [1, 1, 8] to 1 kv heads of 8",
        ),
        (
            "attend(0, *[self.mix(x)[:, None]] * 3)",
            "attend(0, self.mix(x)[:, None], x[:, None], x[:, None, :4])",
            "k [1, 1, 8] of torch.float32 and v [1, 1, 4] of torch.float32: both must be [T, Hkv, D]",
        ),
        (
            "attend(0, *[self.mix(x)[:, None]] * 3)",
            "attend(0, self.mix(x)[:, None].double(), x[:, None], x[:, None])",
            "rows and types must agree",
        ),
        ("return x + attend", "return x.cumsum(0) + attend", "tokens meet outside attend"),
        ("return x + attend", "return x + torch.arange(len(x))[:, None] + attend", "made by counting"),
        (
            "attend(0, *[self.mix(x)[:, None]] * 3)",
            "attend(0, *[turn(self.mix(x) / 9)[:, None]] * 2, self.mix(x)[:, None])",
            "such as those of a rotation, are made by counting",
        ),
        (
            "        x = self.tokens(tokens)\n",
            "        x = self.tokens(tokens) + torch.ones(5, 1)[positions]\n",
            "context_length = 9, but at position 8 forward fails: IndexError",
        ),
        ("return x + attend", "return torch.rand_like(x) + attend", "something else the second time"),
        (
            "        x = self.tokens(tokens)\n",
            "        x = self.tokens(tokens)\n        self.last += x.sum()\n",
            "its buffer last changes during forward; state besides keys and values is not served yet",
        ),
        (
            "class Small(nn.Module):",
            "class Small(nn.Module):\n    position_scheme = 'rotary'",
            "position_scheme = 'rotary', but no layer hands attend what that needs",
        ),
        ("return x + attend", "return x * (1 + positions[:, None]) + attend", "the same tokens further on"),
        ("return self.head(hidden)", "return self.head(hidden.T)", "breaks the contract"),
        ("attend(0, *[self.mix(x)", "attend(0, *[self.mix(x[:, :5])", "docs/add-your-model.md, in mix: RuntimeError"),
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
    code = SMALL.replace(old, new)
    if "self.last" in new:
        code = code.replace(
            "        self.mix",
            "        self.register_buffer('last', torch.zeros(1), persistent=False)\n        self.mix",
        )
    if "turn(" in new:
        code += """
def turn(x):
    angles = torch.arange(len(x))[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
"""
    if "context_length = 9" in says:
        code = code.replace("class Small(nn.Module):", "class Small(nn.Module):\n    context_length = 9")
    if "further on" in says:
        code = code.replace("class Small(nn.Module):", "class Small(nn.Module):\n    position_scheme = 'none'")
    folder, source = small(tmp_path, code)
    assert says in refusal(folder, source)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder, source = small(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["mix.bias"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert "mix.bias has 1 values that are NaN or infinite" in refusal(folder, source)


def test_prefixes_of_wrappers_on_both_sides_and_in_the_middle(tmp_path: Path) -> None:
    """torch.compile of a block, data parallelism in the file, and a module that wraps its own."""
    folder, source = small(tmp_path, SMALL.replace("self.mix", "self.module").replace("mix", "module"))
    tensors = load_file(folder / "model.safetensors")
    stored = {
        "module._orig_mod.tokens.weight": tensors["tokens.weight"],
        "_orig_mod.module.module._orig_mod.weight": tensors["mix.weight"],
        "module.module.bias": tensors["mix.bias"],
    }
    save_file(stored, folder / "model.safetensors")
    state = load_servable(folder, source).module.state_dict()
    assert torch.equal(state["module.weight"], tensors["mix.weight"])
    save_file(stored | {"module.tokens.weight": tensors["tokens.weight"].clone()}, folder / "model.safetensors")
    assert "tokens.weight is stored twice" in refusal(folder, source)


def test_a_file_of_torch_save_serves_like_a_folder(tmp_path: Path) -> None:
    folder, source = small(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for content in (tensors, {"model": tensors, "config": {"vocab_size": 11}}, {"state_dict": tensors}):
        torch.save(content, folder / "weights.pt")
        assert torch.equal(weight(load_servable(folder / "weights.pt", source)), tensors["mix.weight"])
    assert "does not say what model its 3 tensors belong to" in refusal(folder / "weights.pt", "")
    (folder / "config.json").unlink()
    assert "KeyError: 'vocab_size'" in refusal(folder / "weights.pt", source)


def test_a_file_that_is_not_there_and_a_folder_that_is_empty(tmp_path: Path) -> None:
    folder, source = small(tmp_path)
    assert "there is no file" in refusal(folder, "nowhere.py:Small")
    assert "config.json is missing" in refusal(tmp_path / "nowhere", source)
