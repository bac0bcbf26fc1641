"""Draws the loss curve of a log: training loss, smoothed, and validation loss over steps."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_SMOOTHED_POINTS = 200


def draw_curve(records: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG, drawn without a display, that replaces `path` atomically. An empty log gives an empty plot."""
    training = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    figure = Figure(figsize=(7, 4), dpi=100, layout="constrained")
    axes = figure.subplots()
    if training:
        axes.plot(*zip(*smoothed(training), strict=True), label="training", linewidth=1)
    if validation:
        axes.plot(*zip(*validation, strict=True), label="validation", marker="o", markersize=3)
    if training or validation:
        axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(image.getvalue())
    os.replace(partial, path)


def smoothed(points: Sequence[tuple[int, float]], most: int = _SMOOTHED_POINTS) -> list[tuple[float, float]]:
    """At most about `most` points: means over stretches of equal size."""
    size = max(1, len(points) // most)
    stretches = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches]
