"""The bundled checkpoint: complete, small, and able to speak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import pellucid_model
from pellucid_model.attention import TrainingAttend
from pellucid_model.checkpoint import Checkpoint, load_checkpoint
from pellucid_model.tokenizers import CharacterTokenizer, load_tokenizer
from pellucid_model.training.corpus.cleaning import clean
from pellucid_model.training.corpus.generator import generate_lines
from pellucid_model.training.data import pack_rows, prepare
from pellucid_model.training.recipe import DEMO
from pellucid_model.training.samples import continue_tokens
from pellucid_model.training.vocabulary import characters, of_checkpoint

DEMO_FOLDER = Path(pellucid_model.__file__).parent / "demo"


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    checkpoint = load_checkpoint(DEMO_FOLDER)
    checkpoint.model.float()
    return checkpoint


@pytest.fixture(scope="module")
def tokenizer() -> CharacterTokenizer:
    loaded = load_tokenizer(DEMO_FOLDER)
    assert isinstance(loaded, CharacterTokenizer)
    return loaded


def test_the_folder_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in DEMO_FOLDER.iterdir()}
    assert set(sizes) == {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert sum(sizes.values()) <= 2.5e6


def test_it_is_what_the_preset_says(demo: Checkpoint, tokenizer: CharacterTokenizer) -> None:
    assert demo.dtype == torch.bfloat16
    assert demo.config == DEMO.model_config(tokenizer.vocab_size)
    assert demo.notices == ()


def test_its_vocabulary_is_that_of_the_preset_s_training_lines(tokenizer: CharacterTokenizer) -> None:
    corpus = clean(generate_lines(DEMO.generated_lines), DEMO.min_line_length, DEMO.max_line_length)
    data = prepare(corpus.lines, DEMO, lambda lines: characters(lines, {}))
    assert data.vocabulary.files["tokenizer.json"] == tokenizer.to_json()


def test_its_generation_config_names_the_special_tokens(tokenizer: CharacterTokenizer) -> None:
    generation = json.loads((DEMO_FOLDER / "generation_config.json").read_text())
    assert generation == {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.pad_id,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 20,
    }


def test_the_weather_is_fine_today(demo: Checkpoint, tokenizer: CharacterTokenizer) -> None:
    continuation = continue_tokens(demo.model, tokenizer.encode("今天天气"), 60, stop=tokenizer.eos_ids)
    assert continuation[-1] in tokenizer.eos_ids
    text = tokenizer.decode(continuation)
    assert "不错" in text
    assert text.endswith("。")


def test_a_question_is_answered(demo: Checkpoint, tokenizer: CharacterTokenizer) -> None:
    continuation = continue_tokens(demo.model, tokenizer.encode("问：今天天气怎么样？"), 60, stop=tokenizer.eos_ids)
    assert continuation[-1] in tokenizer.eos_ids
    assert tokenizer.decode(continuation).startswith("答：")


def test_it_is_as_sure_at_the_end_of_its_context_as_in_the_middle(demo: Checkpoint) -> None:
    """Loss by position over rows of lines it has not seen; the templates themselves leave about 0.8 nats."""
    trained_on = set(generate_lines(DEMO.generated_lines))
    unseen = [line for line in generate_lines(20_000, seed=1) if line not in trained_on]
    vocabulary = of_checkpoint(DEMO_FOLDER)
    rows = pack_rows([vocabulary.encode_line(line) for line in unseen[:1000]], DEMO.context_length)[:48]
    attend = TrainingAttend(len(rows), DEMO.context_length)
    with torch.no_grad():
        logits = demo.model.logits(demo.model(rows[:, :-1].flatten(), attend.positions, attend))
    losses = F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none").unflatten(0, (len(rows), -1))
    middle, end = losses[:, 96:176].mean().item(), losses[:, 176:].mean().item()
    assert middle < 1.2
    assert end < 1.1 * middle
