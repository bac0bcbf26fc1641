"""Rows, labels and their order; and what the model can see of a row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pellucid_model.attention import TrainingAttend
from pellucid_model.decoder import Decoder
from pellucid_model.training.data import (
    IGNORED,
    Batch,
    BatchSource,
    pack_rows,
    padded_batch,
    prepare,
    validation_batches,
)
from pellucid_model.training.errors import TrainingError
from pellucid_model.training.recipe import DEMO, STUDY_NOTE, Recipe
from pellucid_model.training.vocabulary import Vocabulary, characters

PAD, BOS, EOS, UNK = 0, 1, 2, 3
LINES = [[BOS, *range(10 * n, 10 * n + length), EOS] for n, length in enumerate((4, 2, 6, 3, 5, 1, 4), start=1)]


def character_vocabulary(lines: list[str]) -> Vocabulary:
    return characters(lines, {})


def small(recipe: Recipe) -> Recipe:
    model = dataclasses.replace(recipe, d_model=16, layers=2, heads=2, kv_heads=2, head_dim=8, d_ff=24, dropout=0.0)
    return dataclasses.replace(
        model, context_length=12, max_line_length=10, min_line_length=1, rows=2, validation_lines=2
    )


def test_labels_of_a_padded_row_are_the_next_tokens_and_padding_is_ignored() -> None:
    batch = padded_batch([[BOS, 5, 6, EOS], [BOS, 7, EOS]], PAD)
    assert batch.inputs.tolist() == [[BOS, 5, 6], [BOS, 7, PAD]]
    assert batch.labels.tolist() == [[5, 6, EOS], [7, EOS, IGNORED]]
    assert batch.tokens == 5


def test_packed_rows_begin_with_a_line_and_repeat_the_one_that_was_cut() -> None:
    rows = pack_rows([[BOS, 5, 6, EOS], [BOS, 7, EOS], [BOS, 8, 9, EOS], [BOS, 4, EOS]], length=5)
    assert rows.tolist() == [[BOS, 5, 6, EOS, BOS, 7], [BOS, 7, EOS, BOS, 8, 9], [BOS, 8, 9, EOS, BOS, 4]]


def test_a_line_that_ends_with_the_row_is_not_repeated() -> None:
    rows = pack_rows([[BOS, 5, EOS], [BOS, 6, EOS], [BOS, 7, EOS], [BOS, 8, EOS]], length=5)
    assert rows.tolist() == [[BOS, 5, EOS, BOS, 6, EOS], [BOS, 7, EOS, BOS, 8, EOS]]


def test_too_few_tokens_for_a_row_give_none() -> None:
    assert pack_rows([[BOS, 5, EOS]], length=5).shape == (0, 6)


def test_every_position_of_a_packed_batch_is_trained() -> None:
    batch = BatchSource(LINES, small(DEMO), PAD).next()
    assert batch.inputs.shape == batch.labels.shape == (2, 12)
    assert torch.equal(batch.inputs[:, 1:], batch.labels[:, :-1])
    assert batch.tokens == 24
    assert (batch.inputs[:, 0] == BOS).all()


@pytest.mark.parametrize("recipe", [STUDY_NOTE, DEMO])
def test_a_source_resumes_at_any_position(recipe: Recipe) -> None:
    recipe = small(recipe)
    whole = BatchSource(LINES, recipe, PAD)
    for _ in range(9):
        position = (whole.epoch, whole.batch)
        expected = whole.next()
        resumed = BatchSource(LINES, recipe, PAD)
        resumed.seek(*position)
        assert torch.equal(resumed.next().inputs, expected.inputs)
    assert whole.epoch >= 1


def test_an_epoch_visits_every_line_once_and_in_an_order_of_its_own() -> None:
    source = BatchSource(LINES, dataclasses.replace(small(STUDY_NOTE), rows=1), PAD)
    epochs = [[source.next().inputs[0, 1].item() for _ in LINES] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [line[1] for line in LINES]
    assert epochs[0] != epochs[1]


def test_a_corpus_that_fills_no_batch_is_refused() -> None:
    with pytest.raises(TrainingError, match="too small to fill one batch of 2 rows"):
        BatchSource(LINES[:1], small(DEMO), PAD).next()


def test_prepare_holds_lines_out_of_training_and_out_of_the_vocabulary() -> None:
    lines = [chr(0x4E00 + i) * 4 for i in range(10)]
    data = prepare(lines, small(DEMO), character_vocabulary)
    assert len(data.validation) == 2
    assert len(data.train) == 8
    assert data.vocabulary.size == 4 + 8
    assert all(line == [BOS, UNK, UNK, UNK, UNK, EOS] for line in data.validation)
    assert all(line[0] == BOS and line[-1] == EOS and len(line) == 6 for line in data.train)


def test_prepare_says_how_many_lines_it_needs() -> None:
    with pytest.raises(TrainingError, match=r"corpus: 3 clean lines are too few; .* need at least 4"):
        prepare(["一二三"] * 3, small(DEMO), character_vocabulary)


def test_validation_reads_every_line_once_and_alone() -> None:
    batches = validation_batches(LINES * 40, PAD)
    assert sum(len(batch.inputs) for batch in batches) == 280
    assert sum(batch.tokens for batch in batches) == 40 * sum(len(line) - 1 for line in LINES)


def logits(model: Decoder, batch: Batch) -> torch.Tensor:
    """[B, L, V]."""
    rows, length = batch.inputs.shape
    attend = TrainingAttend(rows, length)
    with torch.no_grad():
        flat = model.logits(model(batch.inputs.flatten(), attend.positions, attend))
    return flat.reshape(rows, length, -1)


@pytest.fixture(params=[STUDY_NOTE, DEMO], ids=["study-note", "demo"])
def model(request: pytest.FixtureRequest) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(small(request.param).model_config(vocab_size=100))
    decoder.initialize(0.3)
    return decoder.eval()


def test_a_later_token_changes_no_earlier_logit(model: Decoder) -> None:
    rows = pack_rows(LINES, 12)
    changed = rows.clone()
    changed[0, 7] = 99
    before, after = (logits(model, Batch(r[:, :-1], r[:, 1:])) for r in (rows, changed))
    assert torch.equal(before[0, :7], after[0, :7])
    assert (before[0, 7:] != after[0, 7:]).any(dim=-1).all()
    assert torch.equal(before[1:], after[1:])


def test_what_stands_in_the_padding_changes_nothing(model: Decoder) -> None:
    padded = [logits(model, padded_batch(LINES[:3], pad)) for pad in (PAD, 55)]
    for row, line in enumerate(LINES[:3]):
        real = len(line) - 1
        assert torch.equal(padded[0][row, :real], padded[1][row, :real])
        alone = logits(model, padded_batch([line], PAD))[0]
        torch.testing.assert_close(padded[0][row, :real], alone)
