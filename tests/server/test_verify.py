"""`pellucid verify`: it says EQUAL of what is, and of what is not it says where, in which layer and which head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pellucid_server.verify.cli import verify_command
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.own_modules import CONTRACT, EXAMPLES, NANOGPT, TEXTBOOK, Example, saved_checkpoint

PARALLEL = CONTRACT["parallel"]


def verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = verify_command([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("example", [*CONTRACT.values(), TEXTBOOK, NANOGPT], ids=lambda e: e.name + e.file)
def test_every_example_is_equal_to_its_own_forward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], example: Example
) -> None:
    adopted = "adopted" in example.file
    path = saved_checkpoint(tmp_path / "w.pt", example) if adopted else example.checkpoint(tmp_path / "w")
    code, said = verify(capsys, example.source, path, "--tokens", "5,6,7,40,2,9,9", "--new-tokens", 14)
    assert code == 0, said
    phases = ["prefill ", "prefill in chunks of 5", "decode", "re-encoded window"]
    if example in (CONTRACT["shared keys and values"], CONTRACT["distance bias"]):
        phases.append("rolling window")
    assert sum("positions" in line and line.endswith("ok") for line in said.splitlines()) == len(phases)
    for phase in phases:
        assert phase in said
    assert ("forward in float64" if adopted else "over textbook attention in float64") in said
    assert "EQUAL: " in said


def test_our_own_checkpoint_a_text_and_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config())
    code, said = verify(capsys, folder, "--prompt", "the 天", "--prompt", "a", "--new-tokens", 9)
    assert code == 0, said
    assert "prompt 2 of 2: 2 tokens, 9 more" in said
    assert verify(capsys, folder, "--tokens", "4,5", "--new-tokens", 9, "--dtype", "bfloat16")[0] == 0
    code, said = verify(capsys, folder, "--tokens", "4,5", "--new-tokens", 9, "--limit", "1e-12")
    assert code == 1
    assert "DIFFERS in 5 of 5 phases, first in: prefill" in said


WRONG = """
import sys
sys.path.insert(0, {folder!r})
from my_model import MyTransformer

class Wrong(MyTransformer):
    "Layer 1 takes head 3 of what it asks attend for in another way."
    def __init__(self, config):
        super().__init__(config)
        block = self.blocks[1]
        forward = block.forward
        def wrongly(x, attend):
            def wrong(layer, q, k, v, **options):
                {change}
            return forward(x, wrong)
        block.forward = wrongly
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "q = q.clone(); q[:, 3] *= 1.01; return attend(layer, q, k, v, **options)",
            "the queries of layer 1, head 3 of 5",
        ),
        (
            "v = v.clone(); v[:, 3] += 0.01; return attend(layer, q, k, v, **options)",
            "the values of layer 1, head 3 of 5",
        ),
        (
            "out = attend(layer, q, k, v, **options).clone(); out[:, 3] *= 0.9; return out",
            "the input of blocks.1.out, head 3 of 5",
        ),
        ("return attend(layer, q, k, v, scale=0.9)", "the attention output of layer 1 ("),
    ],
    ids=["queries", "values", "afterwards", "scale"],
)
def test_one_wrong_head_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, says: str) -> None:
    folder = PARALLEL.checkpoint(tmp_path / "w")
    (tmp_path / "wrong.py").write_text(WRONG.format(folder=str(EXAMPLES / "custom_model"), change=change))
    arguments = ("--reference", PARALLEL.source, "--tokens", "5,6,7,8", "--new-tokens", 8)
    code, said = verify(capsys, f"{tmp_path / 'wrong.py'}:Wrong", folder, *arguments)
    assert code == 1
    assert f"first differs in {says}" in said
    assert "first at position" in said
    assert "likeliest next token: served" in said


def test_a_wrong_weight_is_found_by_the_users_own_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The served copy has one row of one layer changed; the reference is a plain function over the right one."""
    right, wrong = PARALLEL.checkpoint(tmp_path / "right"), PARALLEL.checkpoint(tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    tensors["blocks.2.qkv.weight"][1] *= 1.5
    save_file(tensors, wrong / "model.safetensors")
    (tmp_path / "own.py").write_text(
        f"""
import torch
from pathlib import Path
from pellucid_model.attention import ReferenceAttend
from pellucid_model.servable import load_servable

MODEL = load_servable(Path({str(right)!r}), {PARALLEL.source!r}).model

def forward(tokens):
    positions = torch.arange(tokens.shape[1])
    return MODEL.logits(MODEL.forward(tokens[0], positions, ReferenceAttend([len(positions)], positions)))
"""
    )
    arguments = ("--reference", f"{tmp_path / 'own.py'}:forward", "--tokens", "5,6,7,8", "--new-tokens", 8)
    assert verify(capsys, PARALLEL.source, right, *arguments)[0] == 0
    code, said = verify(capsys, PARALLEL.source, wrong, *arguments)
    assert code == 1
    assert "could not be located" in said


def test_what_cannot_be_tried_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path, tiny_config(context_length=16), tokenizer=False)
    (tmp_path / "own.py").write_text("VALUE = 3")
    for arguments, says in (
        ((folder, "--tokens", "999"), "999 is no token; accepted: 0 to 51"),
        ((folder, "--tokens", ",".join("5" * 16)), "a prompt comes to 16 tokens; accepted: 1 to 15"),
        ((folder, "--tokens", "a"), "invalid _ids value"),
        ((folder, "--prompt", "the"), "has no tokenizer; give --tokens"),
        ((folder, "--reference", f"{tmp_path / 'own.py'}:f"), "no class or function of the name 'f'"),
        ((folder, "--reference", f"{tmp_path / 'own.py'}:VALUE"), "no class or function of the name 'VALUE'"),
        (("a", "b", folder), "at most one module"),
        ((tmp_path / "nowhere",), "nowhere"),
        ((), "required: what"),
    ):
        code, said = verify(capsys, *arguments)
        assert code == 2
        assert says in said
        assert said.count("\n") == 1
    assert json.loads((folder / "config.json").read_text())["context_length"] == 16


def test_a_reference_that_raises_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved_checkpoint(tmp_path / "w.pt", NANOGPT)
    (tmp_path / "own.py").write_text("def broken(tokens):\n    raise KeyError('no such thing')\n")
    code, said = verify(capsys, NANOGPT.source, path, "--reference", f"{tmp_path / 'own.py'}:broken")
    assert code == 2
    assert "pellucid verify: broken() fails on 25 tokens: KeyError: 'no such thing'" in said


FLOAT32 = """
import sys
sys.path.insert(0, {folder!r})
import torch
from my_model import MyTransformer

def placed(x):
    "Writes rows of any type to float32 ones, which torch refuses to do."
    out = torch.zeros(x.shape)
    out[torch.arange(len(x))] = x
    return out

class Longer(MyTransformer):
    "Its float32 tensor meets what is given from the second token on."
    def forward(self, tokens, positions, attend):
        x = super().forward(tokens, positions, attend)
        return placed(x) if len(x) > 1 else x

class Keeps(MyTransformer):
    "Keeps a tensor of the first type that it met, and works in float32 alone."
    kept = {{}}
    def forward(self, tokens, positions, attend):
        x = super().forward(tokens, positions, attend)
        self.kept = self.kept or {{"eye": torch.eye(x.shape[1], dtype=x.dtype)}}
        return placed(x @ self.kept["eye"])

class Forty(MyTransformer):
    "Nobody can know before token 40 comes."
    def forward(self, tokens, positions, attend):
        x = super().forward(tokens, positions, attend)
        return placed(x) if (tokens == 40).any() else x
"""


@pytest.mark.parametrize("name", ["Longer", "Keeps"])
def test_float32_that_is_written_into_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = PARALLEL.checkpoint(tmp_path / "w")
    (tmp_path / "own.py").write_text(FLOAT32.format(folder=str(EXAMPLES / "custom_model")))
    code, said = verify(capsys, f"{tmp_path / 'own.py'}:{name}", folder, "--tokens", "5,6,7", "--new-tokens", 8)
    assert code == 0, said
    assert "over textbook attention in float32" in said


def test_float32_that_comes_up_on_the_way_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = PARALLEL.checkpoint(tmp_path / "w")
    (tmp_path / "own.py").write_text(FLOAT32.format(folder=str(EXAMPLES / "custom_model")))
    code, said = verify(capsys, f"{tmp_path / 'own.py'}:Forty", folder, "--tokens", "5,40,7", "--new-tokens", 1)
    assert code == 2
    last = said.splitlines()[-1]
    assert last.startswith("pellucid verify: the same Forty over textbook attention in float64 fails on ")
    assert "got Float for the destination and Double for the source" in last
