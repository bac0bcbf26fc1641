"""Weights in single files: what is found in them, and pickles that want more than tensors."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pellucid_model.errors import CheckpointError
from pellucid_model.plain_pickle import read_characters, read_plain_pickle
from pellucid_model.saved import read_saved

WEIGHTS = {"a.weight": torch.ones(2, 3), "b": torch.zeros(4)}


class Touch:
    """A pickle that would create a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("around", "settings"),
    [
        (lambda w: w, {}),
        (lambda w: {"model": w, "optimizer": {"state": {}}, "iter_num": 3}, {}),
        (lambda w: {"state_dict": w, "hyper_parameters": {"n": 3, "bias": False}}, {"n": 3, "bias": False}),
        (lambda w: {"model": w, "config": {"lr": 1}, "model_args": {"n_layer": 2}}, {"n_layer": 2}),
        (lambda w: {"model_state_dict": w, "best": np.float64(0.25), "rng": torch.get_rng_state()}, {}),
    ],
)
def test_state_dicts_are_found(tmp_path: Path, around: Any, settings: dict[str, Any], zipped: bool) -> None:
    torch.save(around(WEIGHTS), tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    saved = read_saved(tmp_path / "w.pt")
    assert saved.tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in WEIGHTS.items())
    assert saved.settings == settings


def test_safetensors(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    assert read_saved(tmp_path / "w.safetensors").tensors.keys() == WEIGHTS.keys()


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_saved(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_code_in_a_pickle_never_runs(tmp_path: Path, zipped: bool) -> None:
    """B68: a checkpoint's pickle ran code on load. Neither alone nor beside good weights."""
    path, marker = tmp_path / "w.pt", tmp_path / "marker"
    for content in (Touch(marker), {"model": WEIGHTS, "extra": Touch(marker)}):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        assert "mknod" in refusal(path)
    path.write_bytes(pickle.dumps(Touch(marker)))
    assert "nothing in it was run" in refusal(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # it would have
    assert marker.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model": WEIGHTS, "config": argparse.Namespace(lr=1)}, "asks for argparse.Namespace"),
        (nn.Linear(2, 2), "asks for torch.nn.modules.linear.Linear"),
        ({}, "no state dict under any of model, state_dict"),
        ({"weights_of_mine": WEIGHTS}, "it holds weights_of_mine"),
        (3, "holds a int"),
    ],
)
def test_what_is_no_state_dict(tmp_path: Path, content: Any, says: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    assert says in refusal(tmp_path / "w.pt")


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(WEIGHTS, path)
    whole = path.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"hello, world"):
        path.write_bytes(content)
        assert "is broken or cut short" in refusal(path)


def test_a_pickle_of_plain_values_is_read_and_nothing_else(tmp_path: Path) -> None:
    path, marker = tmp_path / "meta.pkl", tmp_path / "marker"
    path.write_bytes(pickle.dumps({"vocab_size": 3, "itos": {0: "\n", 1: "a", 2: "天"}, "stoi": {"\n": 0}}))
    assert read_characters(path) == ["\n", "a", "天"]
    for content in ({"itos": Touch(marker)}, Touch(marker)):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=r"asks for (posix|os)\.mknod"):
            read_plain_pickle(path)
    assert not marker.exists()
    tables: list[Any] = [{"itos": {0: "a", 2: "b"}}, {"stoi": {}}, [1]]
    for table in tables:
        path.write_bytes(pickle.dumps(table))
        with pytest.raises(CheckpointError, match="no itos table"):
            read_characters(path)
    path.write_bytes(b"\x80\x04nonsense")
    with pytest.raises(CheckpointError, match="broken or no pickle"):
        read_plain_pickle(path)
