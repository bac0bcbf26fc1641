"""The report of growth.py: growth.json, tables in Markdown, a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

from pellucid_benchmark.costs import Costs
from pellucid_benchmark.growing import BASE, BATCH_CONTEXT, BATCHES, CONTEXTS, MODEL_BATCHES, MODEL_PROMPT, Point
from pellucid_benchmark.reporting import table

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

GIGA = 10**9


@dataclass(frozen=True)
class Growth:
    """Seconds of steps, and what each model asks of the machine."""

    precision: str
    threads: int
    costs: Mapping[str, Costs]
    seconds: Mapping[Point, float]

    def decode(self, model: str, batch: int, context: int) -> float:
        """Seconds of one step."""
        return self.seconds[Point("decode", model, batch, context)]

    def prefill(self, model: str, tokens: int) -> float:
        """Seconds of a prompt."""
        return self.seconds[Point("prefill", model, 1, tokens)]


def write_growth(folder: Path, growth: Growth) -> str:
    """Write growth.json, growth.md and growth.png; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "schema": "pellucid.growth/1",
        "precision": growth.precision,
        "threads": growth.threads,
        "costs": {model: asdict(costs) for model, costs in growth.costs.items()},
        "points": [asdict(point) | {"seconds": seconds} for point, seconds in growth.seconds.items()],
    }
    (folder / "growth.json").write_text(json.dumps(values, indent=1) + "\n")
    parts = [_by_batch(growth), _by_context(growth)] if BASE in growth.costs else []
    text = "\n\n".join([*parts, _by_model(growth)]) + "\n"
    (folder / "growth.md").write_text(text)
    _plot(folder / "growth.png", growth)
    return text


def _by_batch(growth: Growth) -> str:
    costs, rows = growth.costs[BASE], []
    for batch in BATCHES:
        seconds = growth.decode(BASE, batch, BATCH_CONTEXT)
        read = costs.step_bytes(batch, BATCH_CONTEXT) / seconds / GIGA
        products = batch * costs.token_operations(BATCH_CONTEXT) / seconds / GIGA
        rows.append([str(batch), _ms(seconds), f"{batch / seconds:.0f}", f"{read:.1f}", f"{products:.0f}"])
    text = f"Decode steps of {BASE} in {growth.precision} by batch, {BATCH_CONTEXT} tokens of context.\n\n"
    return text + table(["sequences", "step, ms", "tokens/s", "GB/s read", "GFLOP/s"], rows)


def _by_context(growth: Growth) -> str:
    rows = [
        [
            f"{context:,}",
            _ms(growth.decode(BASE, 1, context)),
            _ms(growth.decode(BASE, 8, context)),
            _ms(growth.prefill(BASE, context)),
            f"{context / growth.prefill(BASE, context):.0f}",
        ]
        for context in CONTEXTS
    ]
    text = f"{BASE} in {growth.precision} by context; beyond 2,048 tokens it rolls.\n\n"
    return text + table(["context", "step of 1, ms", "step of 8, ms", "prompt, ms", "prompt tokens/s"], rows)


def _by_model(growth: Growth) -> str:
    rows = [
        [
            model,
            f"{costs.read_bytes / 10**6:.1f}",
            *(_ms(growth.decode(model, batch, BATCH_CONTEXT)) for batch in MODEL_BATCHES),
            _ms(growth.prefill(model, MODEL_PROMPT)),
            f"{MODEL_PROMPT / growth.prefill(model, MODEL_PROMPT):.0f}",
        ]
        for model, costs in growth.costs.items()
    ]
    steps = [f"step of {batch}, ms" for batch in MODEL_BATCHES]
    text = f"Models in {growth.precision}, {BATCH_CONTEXT} tokens of context, prompts of {MODEL_PROMPT}.\n\n"
    return text + table(["model", "MB read a step", *steps, "prompt, ms", "prompt tokens/s"], rows)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def _plot(path: Path, growth: Growth) -> None:
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
    if BASE in growth.costs:
        _line(axes[0], BATCHES, [growth.decode(BASE, each, BATCH_CONTEXT) for each in BATCHES], BASE)
        for batch in (1, 8):
            _line(axes[1], CONTEXTS, [growth.decode(BASE, batch, each) for each in CONTEXTS], f"{BASE}, batch {batch}")
    read = [costs.read_bytes / 10**6 for costs in growth.costs.values()]
    for batch in MODEL_BATCHES:
        _line(axes[2], read, [growth.decode(each, batch, BATCH_CONTEXT) for each in growth.costs], f"batch {batch}")
    for axis, label in zip(axes, ("sequences", "tokens of context", "MB of weights read by a step"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="decode step, ms")
        if axis.lines:
            axis.legend(fontsize="small")
    figure.suptitle(growth.precision)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _line(axis: Axes, places: Sequence[float], seconds: Sequence[float], label: str) -> None:
    axis.plot(places, [1000 * each for each in seconds], marker="o", label=label)
