"""`pellucid convert`: what comes out serves as what went in, and nothing is lost or run on the way."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from pellucid_model.attention import ReferenceAttend
from pellucid_model.convert import convert_command
from pellucid_model.servable import Servable, load_servable
from pellucid_model.tokenizers import load_tokenizer
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint, tiny_config
from pellucid_testing.own_modules import CONTRACT, NANOGPT, TEXTBOOK, VOCAB, saved_checkpoint


def convert(*arguments: object) -> int:
    return convert_command([str(argument) for argument in arguments])


@torch.no_grad()
def logits(servable: Servable) -> torch.Tensor:
    tokens = positions = torch.arange(20)
    return servable.model.logits(servable.model.forward(tokens, positions, ReferenceAttend([20], positions)))


def test_a_training_checkpoint_with_the_users_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved_checkpoint(tmp_path / "t.pt", TEXTBOOK, "module._orig_mod.")
    assert convert(source, tmp_path / "out", "--module", TEXTBOOK.source) == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    adapter: Any = TEXTBOOK.module()
    assert stored.keys() == adapter.module.state_dict().keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == TEXTBOOK.config
    before, after = (load_servable(path, TEXTBOOK.source) for path in (source, tmp_path / "out"))
    assert torch.equal(logits(before), logits(after))
    assert "without a tokenizer" in capsys.readouterr().out


def test_nanogpt_and_its_characters(tmp_path: Path) -> None:
    source = saved_checkpoint(tmp_path / "ckpt.pt", NANOGPT)
    table = dict(enumerate([*"@$&_", *CHARACTERS]))
    meta = {"vocab_size": VOCAB, "itos": table, "stoi": {c: i for i, c in table.items()}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert convert(source, tmp_path / "out", "--tokenizer", tmp_path / "meta.pkl") == 0
    assert torch.equal(logits(load_servable(source)), logits(load_servable(tmp_path / "out")))
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer is not None
    assert tokenizer.encode("天地 ab") == [{c: i for i, c in table.items()}[c] for c in "天地 ab"]
    own = convert(source, tmp_path / "own", "--module", NANOGPT.source)
    assert own == 0
    stored = load_file(tmp_path / "own" / "model.safetensors")
    assert ("lm_head.weight" in stored) != ("transformer.wte.weight" in stored), "tied weights are stored once"
    assert torch.equal(
        logits(load_servable(source, NANOGPT.source)), logits(load_servable(tmp_path / "own", NANOGPT.source))
    )


def test_a_folder_keeps_its_tokenizer_defaults_and_end_tokens(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "in", tiny_config())
    values = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert convert(folder, tmp_path / "out", "--dtype", "bfloat16") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == values
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.5}
    assert load_servable(tmp_path / "out").dtype == torch.bfloat16


def test_end_tokens_that_only_config_json_names_are_kept(tmp_path: Path) -> None:
    example = CONTRACT["post-LN"]
    folder = example.checkpoint(tmp_path / "in")
    (folder / "config.json").write_text(json.dumps({**example.config, "eos_token_id": [2, 5]}))
    assert convert(folder, tmp_path / "out", "--module", example.source) == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [2, 5]}
    modules = [cast("Any", load_servable(path, example.source).module) for path in (folder, tmp_path / "out")]
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in modules), strict=True))


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("w_q.bias", "w_query.bias"): tensor for name, tensor in state.items()}


def reshaped(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor[:-1] if "norm.bias" in name else tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("change", "says"), [(renamed, "layers.0.self_attn.w_q.bias"), (reshaped, "norm.bias has shape [35]")]
)
def test_every_tensor_is_used_and_none_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, says: str
) -> None:
    """B65: with a lenient load, what did not fit stayed random, and noise was served."""
    source = saved_checkpoint(tmp_path / "t.pt", TEXTBOOK)
    content = torch.load(source)
    torch.save({**content, "model": change(content["model"])}, source)
    assert convert(source, tmp_path / "out", "--module", TEXTBOOK.source) == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "w.pt"
    torch.save({"a": torch.ones(2)}, weights)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    for arguments, code, says in (
        ((weights, tmp_path / "out"), 1, "does not say what model"),
        ((tmp_path / "nowhere", tmp_path / "out"), 1, "no such folder"),
        ((weights, tmp_path / "full"), 1, "exists already"),
        ((weights, tmp_path / "out", "--tokenizer", tmp_path / "no.json"), 1, "no such file or folder"),
        ((weights, tmp_path / "out", "--module", "nowhere.py:A"), 1, "there is no file"),
        ((weights,), 2, "required: out"),
    ):
        assert convert(*arguments) == code
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
