"""docs/checkpoints.md says what is so: its tables against the code, its example run."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid_model.checkpoint import load_checkpoint
from pellucid_model.config import DecoderConfig
from pellucid_model.families import FAMILIES, glm4
from pellucid_testing.checkpoints import tiny_config, tiny_model

DOCUMENT = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def names_in_table(heading: str) -> set[str]:
    """What stands in backquotes in the first column of the table under a heading."""
    section = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_key_of_the_configuration_is_in_the_table() -> None:
    assert names_in_table("config.json") == {field.name for field in dataclasses.fields(DecoderConfig)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "learned", "activation": "swiglu", "head_bias": True},
        {"norm_placement": "sandwich", "query_key_norm": "per_head", "embedding_dim": 24, "embedding_norm": True},
        {"query_key_norm": "all_heads"},
    ],
)
def test_every_tensor_is_in_the_table(changes: dict[str, object]) -> None:
    listed = names_in_table("Tensors")
    parents = {name.removesuffix(".weight").replace("{i}", "0") for name in listed if not name.startswith(".")}
    parents |= {"blocks.0.attention.value", "blocks.0.feed_forward.down"}  # written as .value and .down
    for name in tiny_model(tiny_config(**changes)).state_dict():
        parent = re.sub(r"blocks\.\d+", "blocks.0", name).rpartition(".")[0]
        assert parent in parents, name


def test_every_family_is_in_its_table() -> None:
    listed = names_in_table("Hugging Face folders") - {"model_type"}
    assert listed == {name for name in FAMILIES if name != "nanogpt"}  # whose checkpoints are single files


def test_the_example_of_a_family_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "add-a-family.md").read_text(encoding="utf-8")
    assert page.split("```python\n")[1].split("```")[0] == Path(glm4.__file__).read_text(encoding="utf-8")


def test_the_example_makes_a_folder_that_loads(tmp_path: Path) -> None:
    example = DOCUMENT.split("```python\n")[1].split("```")[0]
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True, timeout=60)
    loaded = load_checkpoint(tmp_path / "my-model")
    assert loaded.config.position == "alibi"
    assert (tmp_path / "my-model" / "tokenizer.json").exists()
