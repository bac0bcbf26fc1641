"""Looks at the curve of a training run: numbers that are none, a loss that does not fall, jumps, over-fitting.

In: a `Curve`, of our own log or of any table with the columns step, loss and validation_loss. Out: findings.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid_model.doctor.finding import Finding
from pellucid_model.training.errors import TrainingError

Point = tuple[int, float]

_FEWEST = 20
"""Steps below which a curve says nothing."""
_STUCK = 0.02
"""A loss that falls by less than this share does not fall."""
_UNLEARNT = 0.95
"""Share of ln V above which nothing was learnt, V the size of the vocabulary."""
_BEFORE_JUMP = 20
"""Steps whose middle a jump is measured from."""
_JUMP = 1.5
"""A jump is at least this many times the middle of the steps before ..."""
_JUMP_DEVIATIONS = 10
"""... and so many of their usual deviations above it."""
_RISE = 1.2
"""The end of a run lies this far above its best stretch: it went wrong."""
_OVERFIT = 0.03
"""Share by which the validation loss may rise again after its best."""


@dataclass(frozen=True)
class Curve:
    """Losses in nats per token over steps."""

    training: Sequence[Point]
    validation: Sequence[Point]
    diverged: str | None = None
    """What the trainer said when it stopped."""
    vocab_size: int | None = None
    fine_tuned: bool = False
    """Weights that knew something already need not improve by much."""

    @staticmethod
    def of_records(records: Sequence[dict[str, Any]], vocab_size: int | None = None, fine_tuned: bool = False) -> Curve:
        """records: dictionaries with step and loss or validation_loss."""
        diverged = [str(record["diverged"]) for record in records if "diverged" in record]
        return Curve(
            training=[(int(r["step"]), float(r["loss"])) for r in records if "loss" in r],
            validation=[(int(r["step"]), float(r["validation_loss"])) for r in records if "validation_loss" in r],
            diverged=diverged[-1] if diverged else None,
            vocab_size=vocab_size,
            fine_tuned=fine_tuned,
        )


def read_curve(path: Path) -> Curve:
    """A .csv with a header, or one JSON object a line. Raises TrainingError, naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} cannot be read: {error}") from None
    number = 0
    try:
        if path.suffix == ".csv":
            records = [{key: value for key, value in row.items() if value} for row in csv.DictReader(lines)]
        else:
            records = []
            for number, line in enumerate(lines, start=1):  # noqa: B007 - read below, where a line is bad
                records.append(json.loads(line))
        return Curve.of_records(records)
    except (ValueError, KeyError, TypeError) as error:
        where = f"{path}, line {number}" if number else str(path)
        raise TrainingError(f"{where}: not a curve with step, loss and validation_loss: {error}") from None


def examine_curve(curve: Curve) -> list[Finding]:
    """All there is to say about a run."""
    not_finite = _not_finite(curve)
    if not_finite.is_wrong or len(curve.training) < _FEWEST:
        skipped = f"{len(curve.training)} steps with a loss; at least {_FEWEST} are needed"
        return [not_finite] if not_finite.is_wrong else [not_finite, Finding("curve", "skipped", skipped)]
    return [not_finite, _stuck(curve), _jumps(curve), _overfitting(curve)]


def _not_finite(curve: Curve) -> Finding:
    advice = (
        "lower --learning-rate, lengthen --warmup, keep --gradient-clip at 1 or below; "
        "with 16-bit floats look for sums and exponentials outside float32"
    )
    broken = [step for step, loss in (*curve.training, *curve.validation) if not math.isfinite(loss)]
    if broken:
        return Finding("finite loss", "fault", f"the loss is not a number from step {min(broken):,} on", advice)
    if curve.diverged is not None:
        return Finding("finite loss", "fault", curve.diverged, advice)
    return Finding("finite loss", "ok", f"{len(curve.training):,} steps, {len(curve.validation):,} validations")


def _stuck(curve: Curve) -> Finding:
    losses = [loss for _, loss in curve.training]
    first, last = _mean(losses[: max(5, len(losses) // 20)]), _mean(losses[-max(5, len(losses) // 10) :])
    evidence = f"loss {first:.3f} at the beginning, {last:.3f} at the end"
    if curve.vocab_size is not None:
        guess = math.log(curve.vocab_size)
        evidence += f"; guessing among {curve.vocab_size:,} tokens gives {guess:.3f}"
        if last > _UNLEARNT * guess:
            return Finding("learning", "fault", evidence, _STUCK_ADVICE)
    if last > (1 - _STUCK) * first and not curve.fine_tuned:
        return Finding("learning", "fault", evidence, _STUCK_ADVICE)
    best = min(_smoothed(losses))
    if last > _RISE * best:
        evidence += f"; the best stretch had {best:.3f}"
        return Finding(
            "learning", "fault", evidence, "lower --learning-rate; go back to the checkpoint before the rise"
        )
    return Finding("learning", "ok", evidence)


_STUCK_ADVICE = (
    "try another --learning-rate (ten times lower, then higher), check that the optimiser has all parameters, that "
    "labels are the next tokens, and that a batch of two lines can be learnt by heart"
)


def _jumps(curve: Curve) -> Finding:
    """Steps whose loss leaps out of those before it. Isolated ones come from odd data, series from too high a rate."""
    jumps: list[tuple[int, float, float]] = []
    steps = curve.training
    for index in range(_BEFORE_JUMP, len(steps)):
        before = [loss for _, loss in steps[index - _BEFORE_JUMP : index]]
        middle = statistics.median(before)
        deviation = 1.4826 * statistics.median(abs(loss - middle) for loss in before)
        step, loss = steps[index]
        if loss > _JUMP * middle and loss > middle + _JUMP_DEVIATIONS * deviation:
            jumps.append((step, loss, middle))
    if not jumps:
        return Finding("spikes", "ok", f"no step is {_JUMP:g} times above the {_BEFORE_JUMP} before it")
    step, loss, middle = max(jumps, key=lambda jump: jump[1] / jump[2])
    evidence = f"{len(jumps)} in {len(steps):,} steps; the largest at step {step:,}: {loss:.3f} after {middle:.3f}"
    advice = (
        "look at the lines of that step; a lower --learning-rate or --gradient-clip, a longer --warmup, "
        "or --beta2 0.95 make spikes rarer"
    )
    return Finding("spikes", "warning", evidence, advice)


def _overfitting(curve: Curve) -> Finding:
    if len(curve.validation) < 3:
        return Finding("over-fitting", "skipped", f"{len(curve.validation)} validations; at least 3 are needed")
    best_step, best = min(curve.validation, key=lambda point: point[1])
    last_step, last = curve.validation[-1]
    evidence = f"validation loss {best:.3f} at step {best_step:,}, {last:.3f} at step {last_step:,}"
    near = [_mean([loss for _, loss in _around(curve.training, step)]) for step in (best_step, last_step)]
    evidence += f"; training loss {near[0]:.3f} and {near[1]:.3f}"
    if last > (1 + _OVERFIT) * best and near[1] < _RISE * near[0]:
        advice = (
            f"use the weights of about step {best_step:,} (--patience keeps them); more or more varied text, "
            "--dropout, --weight-decay or a smaller model put the point off"
        )
        return Finding("over-fitting", "warning", evidence, advice)
    return Finding("over-fitting", "ok", evidence)


def _around(points: Sequence[Point], step: int) -> Sequence[Point]:
    """The points up to a step, the newest few of them; the first ones where there is none."""
    until = [point for point in points if point[0] <= step]
    return until[-10:] or points[:1]


def _smoothed(losses: Sequence[float]) -> list[float]:
    size = max(5, len(losses) // 20)
    return [_mean(losses[i : i + size]) for i in range(0, len(losses) - size + 1, size)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
