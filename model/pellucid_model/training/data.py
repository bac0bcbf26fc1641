"""From lines to batches.

In: clean lines and a vocabulary. Out: training and validation batches of token ids, in an order that a seed fixes and
that a position (epoch, batch) can be resumed from.

    padded   one line a row:          <bos> a b c <eos> <pad> <pad>
    packed   lines fill the context:  <bos> a b c <eos> <bos> d e <eos> <bos> f g

Both are read with plain causal attention, so a packed row also teaches what a line looks like late in the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid_model.training.errors import TrainingError
from pellucid_model.training.recipe import Recipe
from pellucid_model.training.vocabulary import Vocabulary

IGNORED = -100
"""Label of a position that is not trained."""

_VALIDATION_ROWS = 100


@dataclass(frozen=True)
class Batch:
    """B rows of L tokens; labels[b, t] is the token that follows inputs[b, t]."""

    inputs: Tensor
    """[B, L] int64."""
    labels: Tensor
    """[B, L] int64, IGNORED at padding."""

    @property
    def tokens(self) -> int:
        """Positions that are trained."""
        return int((self.labels != IGNORED).sum())

    def split(self, parts: int) -> list[Batch]:
        """The same rows in `parts` smaller batches of equal size."""
        pairs = zip(self.inputs.chunk(parts), self.labels.chunk(parts), strict=True)
        return [Batch(inputs, labels) for inputs, labels in pairs]


@dataclass(frozen=True)
class Dataset:
    """A corpus, encoded and split."""

    vocabulary: Vocabulary
    train: list[list[int]]
    validation: list[list[int]]
    validation_lines: list[str]
    """The text of `validation`."""
    dropped: int
    """Lines that have more tokens than a row."""

    def summary(self) -> str:
        tokens = sum(len(line) for line in self.train)
        unknown = sum(line.count(self.vocabulary.unk_id) for line in self.train if self.vocabulary.unk_id is not None)
        notes = f", {unknown:,} of them unknown to the vocabulary" if unknown else ""
        if self.dropped:
            notes += f"; {self.dropped:,} lines left out, whose tokens a row does not hold"
        return f"vocabulary {self.vocabulary.size:,}, {tokens:,} tokens to train on{notes}"


def prepare(lines: Sequence[str], recipe: Recipe, vocabulary_of: Callable[[list[str]], Vocabulary]) -> Dataset:
    """Hold out the validation lines, make the vocabulary of the others, encode both."""
    needed = recipe.validation_lines + recipe.rows
    if len(lines) < needed:
        raise TrainingError(
            f"corpus: {len(lines)} clean lines are too few; validation_lines = {recipe.validation_lines} "
            f"and rows = {recipe.rows} need at least {needed}"
        )
    order = _permutation(len(lines), recipe.seed)
    validation = [lines[i] for i in order[: recipe.validation_lines]]
    train = [lines[i] for i in order[recipe.validation_lines :]]
    vocabulary = vocabulary_of(train)
    encoded = [vocabulary.encode_line(line) for line in train]
    held_out = {line: vocabulary.encode_line(line) for line in validation}
    fitting = [ids for ids in encoded if _fits_a_row(ids, recipe)]
    held_out_fitting = {line: ids for line, ids in held_out.items() if _fits_a_row(ids, recipe)}
    if not held_out_fitting:
        raise TrainingError(f"corpus: no held-out line fits a row of context_length = {recipe.context_length} tokens")
    dropped = len(lines) - len(fitting) - len(held_out_fitting)
    return Dataset(vocabulary, fitting, list(held_out_fitting.values()), list(held_out_fitting), dropped)


def _fits_a_row(ids: Sequence[int], recipe: Recipe) -> bool:
    """Two tokens at least: one to read and one to foretell. The last one is never read."""
    return 2 <= len(ids) <= recipe.context_length + 1


def padded_batch(lines: Sequence[Sequence[int]], pad_id: int) -> Batch:
    """One line a row, padded on the right to the longest."""
    length = max(len(line) for line in lines) - 1
    inputs = torch.full((len(lines), length), pad_id)
    labels = torch.full((len(lines), length), IGNORED)
    for row, line in enumerate(lines):
        inputs[row, : len(line) - 1] = torch.tensor(line[:-1])
        labels[row, : len(line) - 1] = torch.tensor(line[1:])
    return Batch(inputs, labels)


def pack_rows(lines: Sequence[Sequence[int]], length: int) -> Tensor:
    """Rows of length + 1 tokens [R, length + 1], each beginning with the beginning of a line.

    A line that the end of a row cuts off begins the next row again, so none is seen only in part. What does not fill
    a row at the end is left out. A line must fit a row.
    """
    rows: list[list[int]] = []
    row: list[int] = []
    for line in lines:
        row.extend(line)
        if len(row) > length:
            rows.append(row[: length + 1])
            row = list(line) if len(row) > length + 1 else []
    return torch.tensor(rows).reshape(-1, length + 1)


def validation_batches(lines: Sequence[Sequence[int]], pad_id: int) -> list[Batch]:
    """Every held-out line alone in a row, whatever the training layout, so that losses of all runs compare."""
    by_length = sorted(lines, key=len)
    return [
        padded_batch(by_length[i : i + _VALIDATION_ROWS], pad_id) for i in range(0, len(by_length), _VALIDATION_ROWS)
    ]


class BatchSource:
    """An endless stream of training batches. Every epoch visits the lines in an order of its own.

    `epoch` and `batch` say which batch comes next; setting both by `seek` resumes the stream there. Rows that do not
    fill the last batch of an epoch are left out.
    """

    def __init__(self, lines: Sequence[Sequence[int]], recipe: Recipe, pad_id: int) -> None:
        self._lines = lines
        self._recipe = recipe
        self._pad_id = pad_id
        self.seek(0, 0)

    def seek(self, epoch: int, batch: int) -> None:
        self.epoch = epoch
        self.batch = batch
        self._batches = self._epoch_batches(epoch, batch)

    def next(self) -> Batch:
        found = next(self._batches, None)
        if found is None:
            if self.batch == 0:
                raise TrainingError(f"corpus: too small to fill one batch of {self._recipe.rows} rows")
            self.seek(self.epoch + 1, 0)
            return self.next()
        self.batch += 1
        return found

    def _epoch_batches(self, epoch: int, first: int) -> Iterator[Batch]:
        size = self._recipe.rows
        order = _permutation(len(self._lines), self._recipe.seed + 1 + epoch)
        if self._recipe.layout == "padded":
            for start in range(first * size, len(order) - size + 1, size):
                yield padded_batch([self._lines[i] for i in order[start : start + size]], self._pad_id)
        else:
            rows = pack_rows([self._lines[i] for i in order], self._recipe.context_length)
            for start in range(first * size, len(rows) - size + 1, size):
                chosen = rows[start : start + size]
                yield Batch(chosen[:, :-1], chosen[:, 1:])


def _permutation(count: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order
