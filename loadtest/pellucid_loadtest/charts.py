"""The report's plots as SVG text, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

POINTS = 500
"""Of a distribution's curve; the samples behind it may be millions."""
COLOURS = {"ttft": "#2563eb", "itl": "#d97706", "e2e": "#059669"}


def cdf(title: str, milliseconds: Sequence[float], limit: float | None, colour: str) -> str:
    """Share of samples at or below each latency, on a logarithmic axis; `limit` is drawn where it is set."""
    figure, axes = _figure(title, "milliseconds", "share")
    ordered = sorted(milliseconds)
    if ordered:
        last = len(ordered) - 1
        ranks = sorted({round(step * last / POINTS) for step in range(POINTS + 1)})
        axes.step(
            [ordered[rank] for rank in ranks], [(rank + 1) / len(ordered) for rank in ranks], colour, where="post"
        )
        if ordered[0] > 0 and ordered[-1] > 2 * ordered[0]:
            _logarithmic(axes, ordered[-1] / ordered[0])
    if limit is not None:
        axes.axvline(limit, color="#dc2626", linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.02)
    return _svg(figure)


def over_time(title: str, unit: str, values: Sequence[float], bucket: float, warm_until: float, colour: str) -> str:
    """A value per bucket over the whole run; the warm-up is shaded."""
    figure, axes = _figure(title, "seconds", unit)
    edges = [index * bucket for index in range(len(values) + 1)]
    axes.stairs(values, edges, color=colour, linewidth=1.5)
    if warm_until > 0:
        axes.axvspan(0, warm_until, color="#000000", alpha=0.06, linewidth=0)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(bottom=0)
    return _svg(figure)


def _figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.8, 2.9))
    axes: Axes = figure.subplots(gridspec_kw={"left": 0.14, "right": 0.97, "bottom": 0.17, "top": 0.9})
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _logarithmic(axes: Axes, span: float) -> None:
    """A logarithmic x axis with plain numbers; `span` is the largest value over the smallest."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 1000 else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _svg(figure: Figure) -> str:
    """Without the XML prologue, which names addresses that a page of its own has no use for."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # Text stays text.
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
