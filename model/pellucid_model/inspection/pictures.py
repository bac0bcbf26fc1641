"""Draws what was seen, without a display: attention maps, entropies, norms, and the tokens that would come next.

In: plain arrays and labels. Out: PNG files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pellucid_model.inspection.labels import Fonts

Floats = NDArray[np.float32]

_DPI = 110
_MOST_LABELS = 40
"""Of an axis; beyond it every second, third ... token is labelled."""
_UPRIGHT = 2
"""Longest label under a picture that is not turned."""


def draw_attention(maps: Floats, labels: Sequence[str], title: str, fonts: Fonts, path: Path) -> None:
    """maps [Hq, n, n] of one layer: a field per head; rows look, columns are looked at."""
    heads, count = maps.shape[:2]
    columns = min(heads, 4)
    rows = math.ceil(heads / columns)
    side = min(7.0, max(2.6, 0.17 * min(count, _MOST_LABELS) + 1.2))
    with _fonts(fonts):
        figure = Figure(figsize=(columns * side, rows * side + 0.5), dpi=_DPI, layout="constrained")
        fields = figure.subplots(rows, columns, squeeze=False).flatten()
        for head, axes in enumerate(fields[:heads]):
            image = axes.imshow(maps[head], vmin=0, vmax=1, cmap="magma", interpolation="nearest")
            axes.set_title(f"head {head}", fontsize=9)
            _tokens_along(axes, labels, "x", size=7)
            _tokens_along(axes, labels, "y", size=7)
        for axes in fields[heads:]:
            axes.set_axis_off()
        figure.suptitle(f"{title}: each row is a token, and what it takes from each token")
        figure.colorbar(image, ax=fields.tolist(), shrink=0.6, label="share of attention")
        figure.savefig(path, metadata={"Software": None})


def draw_heads(values: Sequence[Floats], path: Path, fonts: Fonts) -> None:
    """values: per layer [Hq], 0 ... 1."""
    most = max(len(heads) for heads in values)
    grid = np.full((len(values), most), np.nan, dtype=np.float32)
    for layer, heads in enumerate(values):
        grid[layer, : len(heads)] = heads
    with _fonts(fonts):
        size = (max(4.0, 0.5 * most + 2), max(2.5, 0.4 * len(values) + 1.5))
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for (layer, head), value in np.ndenumerate(grid):
            if not np.isnan(value):
                axes.text(head, layer, f"{value:.2f}", ha="center", va="center", fontsize=7, color=_ink(float(value)))
        axes.set_xticks(range(most))
        axes.set_yticks(range(len(values)))
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        axes.set_title("entropy of attention (0: one token, 1: all the same)", fontsize=10)
        figure.colorbar(image)
        figure.savefig(path, metadata={"Software": None})


def draw_norms(norms: Floats, names: Sequence[str], labels: Sequence[str], path: Path, fonts: Fonts) -> None:
    """norms [stages, n]: the length of each token's hidden vector, as coloured squares on a logarithmic scale."""
    with _fonts(fonts):
        size = (max(5.0, 0.24 * min(len(labels), _MOST_LABELS) + 3), max(2.5, 0.32 * len(names) + 1.8))
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        positive = np.clip(norms, np.finfo(np.float32).tiny, None)
        image = axes.imshow(positive, cmap="viridis", aspect="auto", norm="log", interpolation="nearest")
        axes.set_yticks(range(len(names)), names, fontsize=8)
        _tokens_along(axes, labels, "x", size=8)
        axes.set_title("length of hidden states", fontsize=10)
        figure.colorbar(image, label="Euclidean norm")
        figure.savefig(path, metadata={"Software": None})


def draw_next_tokens(
    probabilities: Floats, candidates: Sequence[Sequence[str]], labels: Sequence[str], path: Path, fonts: Fonts
) -> None:
    """A line per token: what would come after it. probabilities [n, k], candidates [n][k]; the likeliest first."""
    count, width = probabilities.shape
    with _fonts(fonts):
        figure = Figure(figsize=(1.7 + 1.5 * width, 0.9 + 0.27 * count), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        axes.imshow(probabilities, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for (row, column), value in np.ndenumerate(probabilities):
            text = f"{_plain(candidates[row][column])}  {value:.2f}"
            axes.text(
                column, row, text, ha="center", va="center", fontsize=8, color="white" if value > 0.6 else "black"
            )
        axes.set_xticks(range(width), [f"{place + 1}" for place in range(width)], fontsize=8)
        axes.set_yticks(range(count), [_plain(label) for label in labels], fontsize=8)
        axes.set_xlabel("likeliest next tokens")
        axes.set_ylabel("after token")
        figure.savefig(path, metadata={"Software": None})


def _fonts(fonts: Fonts) -> AbstractContextManager[None]:
    return matplotlib.rc_context({"font.family": list(fonts.families)})


def _tokens_along(axes: Axes, labels: Sequence[str], which: str, size: int) -> None:
    step = math.ceil(len(labels) / _MOST_LABELS)
    places = range(0, len(labels), step)
    shown = [_plain(labels[place]) for place in places]
    if which == "y":
        axes.set_yticks(places, shown, fontsize=size)
    else:
        axes.set_xticks(places, shown, fontsize=size)
        for label in axes.get_xticklabels():
            label.set_rotation(0 if len(label.get_text()) <= _UPRIGHT else 90)


def _plain(label: str) -> str:
    """A dollar sign would begin a formula."""
    return label.replace("$", r"\$")


def _ink(value: float) -> str:
    return "black" if value > 0.6 else "white"
