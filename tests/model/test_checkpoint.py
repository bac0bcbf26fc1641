"""Checkpoints load as they were saved, or are refused with one line that names what is wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid_model.checkpoint import load_checkpoint, save_checkpoint
from pellucid_model.errors import CheckpointError, ConfigError, ModelError
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config, tiny_model


@pytest.mark.parametrize("changes", [{}, {"tied_head": True}, {"position": "learned", "head_bias": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype) -> None:
    model = tiny_model(tiny_config(**changes))
    save_checkpoint(tmp_path, model, dtype)
    loaded = load_checkpoint(tmp_path)
    assert loaded.dtype == dtype
    assert loaded.config == model.config
    assert not loaded.model.training
    assert not loaded.notices
    for (name, want), (_, have) in zip(model.state_dict().items(), loaded.model.state_dict().items(), strict=True):
        assert torch.equal(want.to(dtype), have), name
    if changes.get("tied_head"):
        assert loaded.model.head.weight is loaded.model.embedding.weight


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def refused(folder: Path, kind: type[ModelError] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        load_checkpoint(folder)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_missing_extra_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    name = "blocks.1.norm2.weight"
    tiny_checkpoint(tmp_path)
    edit_tensors(tmp_path, **{name: None})
    assert f"tensors are missing: {name}" in refused(tmp_path)
    edit_tensors(tmp_path, **{name: torch.zeros(41)})
    assert f"{name} has shape [41], but config.json asks for [40]" in refused(tmp_path)
    edit_tensors(tmp_path, **{name: torch.zeros(40), "stranger": torch.zeros(1)})
    assert "tensors that the model does not have: stranger" in refused(tmp_path)
    edit_tensors(tmp_path, stranger=None, **{name: torch.zeros(40, dtype=torch.int32)})
    assert name in refused(tmp_path)


@pytest.mark.parametrize("kept", [0, 8, 0.5, -1])
def test_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    path = tiny_checkpoint(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if kept == 0.5 else int(kept)])
    assert "model.safetensors is broken or cut short" in refused(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "config.json is missing" in refused(tmp_path)
    tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff{}", ""])
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert "config.json" in refused(tmp_path)


def test_unknown_architecture_lists_what_is_known(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    message = refused(tmp_path, ConfigError)
    assert "'mamba' is not known" in message
    assert '"pellucid.decoder"' in message
    assert " llama, " in message
    assert "FILE.py:CLASS" in message


def shard(folder: Path) -> dict[str, str]:
    """Split model.safetensors into two shards with an index, as Hugging Face does."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    where = {name: f"model-0000{1 + 2 * i // len(names)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def test_shards_are_joined_and_checked_against_their_index(tmp_path: Path) -> None:
    want = load_checkpoint(tiny_checkpoint(tmp_path)).model.state_dict()
    where = shard(tmp_path)
    have = load_checkpoint(tmp_path).model.state_dict()
    assert all(torch.equal(want[name], have[name]) for name in want)

    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where | {"ghost": next(iter(where.values()))}}))
    assert "names tensors that no shard holds: ghost" in refused(tmp_path)
    partial = {name: file for name, file in where.items() if name != "final_norm.weight"}
    index.write_text(json.dumps({"weight_map": partial}))
    assert "does not name tensors of its shards: final_norm.weight" in refused(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    assert "must be a file name in the same folder" in refused(tmp_path)
    index.write_text(json.dumps({"weight_map": where}))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refused(tmp_path)


def test_tied_model_with_another_head_says_so(tmp_path: Path) -> None:
    config = tiny_config(tied_head=True)
    tiny_checkpoint(tmp_path, config)
    edit_tensors(tmp_path, **{"head.weight": torch.zeros(config.vocab_size, config.d_model)})
    loaded = load_checkpoint(tmp_path)
    assert "a different head is stored" in loaded.notices[0]
    assert loaded.model.head.weight.abs().max() > 0


def test_saving_never_leaves_half_a_file(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def with_header(folder: Path, change: Callable[[dict[str, Any], int], None]) -> None:
    """Rewrite the header of model.safetensors, a JSON object before the data; `change` gets it and the data's size."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    change(header, len(whole) - end)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])


def moved(header: dict[str, Any], size: int) -> None:
    header["final_norm.weight"]["data_offsets"] = [size, size + 160]


def overlapping(header: dict[str, Any], size: int) -> None:
    header["blocks.0.norm1.weight"]["data_offsets"] = header["final_norm.weight"]["data_offsets"]


def negative(header: dict[str, Any], size: int) -> None:
    header["final_norm.weight"]["data_offsets"] = [-160, 0]


def of_another_size(header: dict[str, Any], size: int) -> None:
    header["final_norm.weight"]["shape"] = [1 << 60]


@pytest.mark.parametrize("change", [moved, overlapping, negative, of_another_size], ids=lambda change: change.__name__)
def test_offsets_that_lie_are_refused(tmp_path: Path, change: Callable[[dict[str, Any], int], None]) -> None:
    with_header(tiny_checkpoint(tmp_path), change)
    assert "model.safetensors is broken or cut short" in refused(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_weight_that_is_no_number_is_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    name = "blocks.1.feed_forward.up.weight"
    save_checkpoint(tmp_path, tiny_model(), dtype)
    tensor = load_file(tmp_path / "model.safetensors")[name]
    tensor[-1, -1] = value
    edit_tensors(tmp_path, **{name: tensor})
    assert f"{name} has 1 values that are NaN or infinite" in refused(tmp_path)


def test_a_shard_that_holds_what_another_should_is_refused(tmp_path: Path) -> None:
    where = shard(tiny_checkpoint(tmp_path))
    one, other = sorted(set(where.values()))
    swapped = where | {"final_norm.weight": one if where["final_norm.weight"] == other else other}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": swapped}))
    assert "names other shards than those that hold: final_norm.weight" in refused(tmp_path)
    index.write_text(json.dumps({"weight_map": where}))
    save_file(load_file(tmp_path / one) | {"final_norm.weight": torch.zeros(40)}, tmp_path / one)
    save_file(load_file(tmp_path / other) | {"final_norm.weight": torch.zeros(40)}, tmp_path / other)
    assert f"{other}: final_norm.weight is also in {one}" in refused(tmp_path)
    for content in ('{"weight_map": {}}', '{"weight_map": {"x": 1}}', "{}"):
        index.write_text(content)
        assert "weight_map must map tensor names to file names" in refused(tmp_path)


def as_pickle(folder: Path, value: object, **options: Any) -> Path:
    """pytorch_model.bin in the place of model.safetensors."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(value, folder / "pytorch_model.bin", **options)
    return folder


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_of_tensors_loads(tmp_path: Path, archive: bool) -> None:
    model = load_checkpoint(tiny_checkpoint(tmp_path)).model
    as_pickle(tmp_path, model.state_dict(), _use_new_zipfile_serialization=archive)
    have = load_checkpoint(tmp_path).model.state_dict()
    assert all(torch.equal(tensor, have[name]) for name, tensor in model.state_dict().items())


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    load_checkpoint(tmp_path)


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_with_code_is_refused_and_nothing_runs(tmp_path: Path, archive: bool) -> None:
    """The loader reads tensors alone and is never replaced by one that trusts the file."""
    state: dict[str, Any] = dict(load_checkpoint(tiny_checkpoint(tmp_path)).model.state_dict())
    made = tmp_path / "made"
    as_pickle(tmp_path, state | {"extra": Marker(made)}, _use_new_zipfile_serialization=archive)
    message = refused(tmp_path)
    assert "pytorch_model.bin asks for pathlib" in message or "pytorch_model.bin asks for getattr" in message
    assert "nothing in it was run" in message
    assert not made.exists()


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    state = load_checkpoint(tiny_checkpoint(tmp_path)).model.state_dict()
    assert "holds what is no tensor: epoch" in refused(as_pickle(tmp_path, dict(state) | {"epoch": 3}))
    assert "must hold tensors by name" in refused(as_pickle(tmp_path, list(state.values())))
    sparse = dict(state) | {"head.weight": state["head.weight"].to_sparse()}
    assert "holds what is no tensor: head.weight" in refused(as_pickle(tmp_path, sparse))
    whole = as_pickle(tmp_path, state) / "pytorch_model.bin"
    content = whole.read_bytes()
    for kept in (0, 10, len(content) // 2, len(content) - 1):
        whole.write_bytes(content[:kept])
        assert "pytorch_model.bin is broken or cut short" in refused(tmp_path)
    for garbage in (b"not even a pickle", pickle.dumps({"a": 1}, protocol=4), b"\x80\x02h\xff.", bytes(100)):
        whole.write_bytes(garbage)
        assert "pytorch_model.bin is broken" in refused(tmp_path)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_prefixes_of_wrappers_are_taken_off(tmp_path: Path, prefix: str) -> None:
    want = load_checkpoint(tiny_checkpoint(tmp_path)).model.state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    have = load_checkpoint(tmp_path).model.state_dict()
    assert all(torch.equal(want[name], have[name]) for name in want)
