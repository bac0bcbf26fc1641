"""What the frontend reads of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pellucid_server.checkpoint_info import CheckpointInfo, SamplingDefaults, read_checkpoint_info
from pellucid_server.errors import StartError
from pellucid_server.settings import Settings


def read(
    folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None, **settings: Any
) -> CheckpointInfo:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_checkpoint_info(Settings(checkpoint=str(folder), **settings))


def test_end_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    assert read(tmp_path, {}).eos_ids == ()
    assert read(tmp_path, {"eos_token_id": 5}).eos_ids == (5,)
    assert read(tmp_path, {"eos_token_id": 5}, {"eos_token_id": [9, 5]}).eos_ids == (5, 9)
    assert read(tmp_path, {"eos_token_id": None}, {"eos_token_id": 0}).eos_ids == (0,)


@pytest.mark.parametrize("bad", [-1, "5", 1.5, True, [3, -1], {}])
def test_other_end_ids_are_refused(tmp_path: Path, bad: object) -> None:
    with pytest.raises(StartError, match=r"config\.json: eos_token_id = "):
        read(tmp_path, {"eos_token_id": bad})


def test_sampling_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, {}).sampling == SamplingDefaults()
    given = {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": None, "do_sample": True}
    assert read(tmp_path, {}, given).sampling == SamplingDefaults(temperature=0.6, top_k=0, top_p=0.9)
    more: dict[str, Any] = {"typical_p": 0.5, "repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 2}
    info = read(tmp_path, {}, more)
    assert (info.sampling, info.notices) == (SamplingDefaults(**more), ())
    greedy = read(tmp_path, {}, {"temperature": 0.6, "do_sample": False}).sampling
    assert greedy.temperature == 0.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_p", 0),
        ("temperature", "hot"),
        ("top_k", -1),
        ("min_p", 1.0),
        ("typical_p", 0),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
    ],
)
def test_defaults_out_of_range_are_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(StartError, match=rf"generation_config\.json: {key} = .* is not accepted; accepted: "):
        read(tmp_path, {}, {key: value})


def test_fields_that_are_not_applied_are_told(tmp_path: Path) -> None:
    info = read(tmp_path, {}, {"no_repeat_ngram_size": 3, "num_beams": 1, "transformers_version": "5"})
    (notice,) = info.notices
    assert "no_repeat_ngram_size = 3 is not applied" in notice


def test_names(tmp_path: Path) -> None:
    assert read(tmp_path / "mine", {}).name == "mine"
    assert read(tmp_path / "mine", {}, model_name="yours").name == "yours"


def test_without_a_folder_the_bundled_checkpoint_is_served() -> None:
    info = read_checkpoint_info(Settings())
    assert info.name == "demo"
    assert (info.folder / "model.safetensors").is_file()
    assert info.eos_ids


def test_unusable_folders(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(StartError) as caught:
            read_checkpoint_info(Settings(checkpoint=str(path)))
        return str(caught.value)

    assert "does not exist" in refusal(tmp_path / "missing")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "file").touch()
    assert "is not a folder" in refusal(tmp_path / "file")
    (tmp_path / "config.json").write_text("{")
    assert "is not valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "is not valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "no JSON object" in refusal(tmp_path)
