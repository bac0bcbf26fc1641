"""Changes tokens and looks which logits move: what a row must not see, what it must, and what it was taught to say.

A model that follows the contract can only go wrong beside `attend`: a convolution, a mean over tokens, a mask of its
own, labels that were not shifted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid_model.attention import ReferenceAttend, TrainingAttend
from pellucid_model.contract import DecoderModel
from pellucid_model.doctor.finding import Finding
from pellucid_model.doctor.subject import Subject

_MOVED = 1e-5
"""A logit has moved where it changes by more than this share of the largest logit; rounding alone moves it less."""
_SHIFTS = (0, 2, 3, -1)
_CLEARLY = 0.8
"""Another shift must fit this much better to count."""


def future_leak(subject: Subject) -> Finding:
    """Another token at one place may change no logit before it."""
    worst, places = 0.0, 0
    worst_place = (0, 0)
    for reading in subject.readings[:3]:
        tokens = reading.tokens
        for place in sorted({len(tokens) // 4, len(tokens) // 2, len(tokens) - 1} - {0}):
            changed = [*tokens[:place], subject.another(tokens[place]), *tokens[place + 1 :]]
            moved = _movement(_logits(subject, [changed])[0][:place], reading.logits[:place])
            places += 1
            row = int(moved.argmax())
            if moved[row] > worst:
                worst, worst_place = float(moved[row]), (place, row)
    evidence = f"{places} tokens changed one at a time; earlier logits moved by {worst:.1e} of the largest at most"
    if worst > _MOVED:
        evidence += f" (token {worst_place[0]} changed, logits of token {worst_place[1]} moved)"
        advice = (
            "the model sees tokens that it is to foretell: look for a convolution padded on both sides, a mean or norm "
            "over tokens, or a mask that is missing or turned round; its training loss means nothing until that is gone"
        )
        return Finding("future leak", "fault", evidence, advice)
    return Finding("future leak", "ok", evidence)


def padding_leak(subject: Subject) -> Finding:
    """What stands in the padding, and in another sequence of the batch, may change no logit."""
    tokens, neighbour = subject.sequences[0], subject.sequences[-1][::-1]
    half = tokens[: max(1, len(tokens) // 2)]
    filled = [[*half, *[subject.another(0) for _ in range(len(tokens) - len(half))]] for _ in range(2)]
    padded = [_training_logits(subject, [row, row])[0][: len(half)] for row in filled]
    others = [[subject.another(token) for token in neighbour] for _ in range(2)]
    crowded = [_logits(subject, [tokens, other])[0] for other in others]
    by_padding, by_neighbour = (float(_movement(a, b).max()) for a, b in (padded, crowded))
    evidence = f"logits moved by {by_padding:.1e} with other padding, by {by_neighbour:.1e} beside another sequence"
    if max(by_padding, by_neighbour) > _MOVED:
        advice = "the model mixes tokens outside attend: a mean, norm or convolution over all tokens of the batch"
        return Finding("padding leak", "fault", evidence, advice)
    return Finding("padding leak", "ok", evidence)


def looks_back(subject: Subject) -> Finding:
    """Another first token must change later logits, and so must another order of the tokens before the last."""
    reading = max(subject.readings, key=lambda r: len(r.tokens))
    tokens = reading.tokens
    if len(tokens) < 4:
        return Finding("looking back", "skipped", f"sequences of {len(tokens)} tokens; at least 4 are needed")
    middle = len(tokens) // 2
    changed = [*tokens[:middle], subject.another(tokens[middle]), *tokens[middle + 1 :]]
    by_token = float(_movement(_logits(subject, [changed])[0][-1:], reading.logits[-1:]).max())
    by_order = max(_moved_by_swaps(subject, tokens, reading.logits[-1:]), default=math.nan)
    evidence = (
        f"the last logits move by {by_token:.1e} with another token before them, by {by_order:.1e} in another order"
    )
    if by_token <= _MOVED:
        advice = (
            "the model does not use what came before: look whether attention's output reaches the residual stream, "
            "whether its weights are still zero, and whether the mask hides everything"
        )
        return Finding("looking back", "fault", evidence, advice)
    if by_order <= _MOVED:
        advice = (
            "the order of tokens makes no difference: positions do not enter; hand rotary or alibi_slopes to attend"
        )
        return Finding("looking back", "fault", evidence, advice)
    return Finding("looking back", "ok", evidence)


def _moved_by_swaps(subject: Subject, tokens: list[int], last: Tensor) -> list[float]:
    """How far the last logits move when two neighbours of different tokens change places, for a few such pairs."""
    pairs = [i for i in range(1, len(tokens) - 2) if tokens[i] != tokens[i + 1]][-4:]
    swapped = [[*tokens[:i], tokens[i + 1], tokens[i], *tokens[i + 2 :]] for i in pairs]
    return [float(_movement(_logits(subject, [other])[0][-1:], last).max()) for other in swapped]


def label_shift(subject: Subject) -> Finding:
    """Logits of a token must fit the next one best, not the token itself nor the one after the next."""
    if not subject.from_text:
        return Finding("label shift", "skipped", "needs a text like that of the training: --corpus FILE")
    losses = {shift: _loss_at(subject, shift) for shift in (1, *_SHIFTS)}
    listed = ", ".join(f"{_SHIFT_NAMES[shift]} {loss:.3f}" for shift, loss in losses.items())
    guess = math.log(subject.vocab_size)
    evidence = f"loss against {listed}; guessing gives {guess:.3f}"
    best = min(losses, key=lambda shift: losses[shift])
    if best != 1 and losses[best] < _CLEARLY * losses[1]:
        advice = {
            0: "labels were not shifted: train row t on token t + 1, and shift only once, in the data or in the loss",
            -1: "labels were shifted the wrong way: train row t on token t + 1",
        }.get(best, "labels were shifted more than once: shift in the data or in the loss, not in both")
        return Finding("label shift", "fault", evidence, advice)
    if losses[1] > 0.95 * guess:
        advice = (
            "the model knows nothing of this text: it is not trained, the text is of another kind, or tokenizer and "
            "weights do not belong together"
        )
        return Finding("label shift", "warning", evidence, advice)
    return Finding("label shift", "ok", evidence)


_SHIFT_NAMES = {
    1: "the next token",
    0: "the token itself",
    2: "the one after the next",
    3: "the third",
    -1: "the one before",
}


def _loss_at(subject: Subject, shift: int) -> float:
    """Mean cross entropy of each row's logits against the token `shift` places on, over all rows that have both."""
    total, count = 0.0, 0
    for reading in subject.readings:
        tokens = torch.tensor(reading.tokens)
        rows = torch.arange(max(0, -shift), min(len(tokens), len(tokens) - shift))
        if len(rows) > 0:
            total += F.cross_entropy(reading.logits[rows], tokens[rows + shift], reduction="sum").item()
            count += len(rows)
    return total / count if count else math.inf


def _movement(a: Tensor, b: Tensor) -> Tensor:
    """[n, V] twice -> [n]: largest change of a row's logits, as a share of the largest logit."""
    return (a - b).abs().amax(dim=-1) / b.abs().max().clamp_min(1e-30)


@torch.no_grad()
def _logits(subject: Subject, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Whole sequences in one ragged batch -> [n, V] of each."""
    lengths = [len(tokens) for tokens in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    model = cast("DecoderModel", subject.module)
    tokens = torch.tensor([token for tokens in sequences for token in tokens])
    hidden = model.forward(tokens, positions, ReferenceAttend(lengths, positions))
    return list(model.logits(hidden).float().split(lengths))


@torch.no_grad()
def _training_logits(subject: Subject, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Rows of equal length as in training -> [L, V] of each."""
    attend = TrainingAttend(len(rows), len(rows[0]))
    model = cast("DecoderModel", subject.module)
    hidden = model.forward(torch.tensor(rows).flatten(), attend.positions, attend)
    return list(model.logits(hidden).float().split(len(rows[0])))
