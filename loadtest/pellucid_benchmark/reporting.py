"""The report of a benchmark: bench.json with every sample, a table in Markdown, a plot."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def write_report(folder: Path, report: dict[str, Any]) -> str:
    """Write bench.json, bench.md and bench.png; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    text = "\n\n".join(_model_table(name, model) for name, model in report["models"].items()) + "\n"
    (folder / "bench.md").write_text(text)
    _plot(folder / "bench.png", report["models"])
    return text


def _model_table(name: str, model: dict[str, Any]) -> str:
    scenarios = list(dict.fromkeys(each["scenario"] for each in model["summaries"]))
    values = {(each["engine"], each["scenario"]): each for each in model["summaries"]}
    engines = list(dict.fromkeys(each["engine"] for each in model["summaries"]))
    rows = [f"### {name}, tokens per second (median of quiet runs)", ""]
    rows.append("| engine | " + " | ".join(scenarios) + " | TTFT ms | RSS MiB |")
    rows.append("|---" * (len(scenarios) + 3) + "|")
    for engine in engines:
        cells = [_cell(values, engine, scenario, engines) for scenario in scenarios]
        first = values.get((engine, scenarios[0]))
        first_text = f"{first['first_ms']:.1f}" if first else ""
        rows.append(f"| {engine} | " + " | ".join(cells) + f" | {first_text} | {model['resident_mib'][engine]:.0f} |")
    rows += ["", _limits_text(model["limits"])]
    noisy = sum(each["samples"] - each["quiet_samples"] for each in model["summaries"])
    total = sum(each["samples"] for each in model["summaries"])
    rows.append(f"{total} runs, {noisy} of them noisy and left out where quiet ones exist.")
    return "\n".join(rows)


def _cell(values: dict[tuple[str, str], dict[str, Any]], engine: str, scenario: str, engines: list[str]) -> str:
    """The median, and for Pellucid its ratio to the best peer."""
    own = values.get((engine, scenario))
    if own is None:
        return ""
    text = f"{own['value']:.0f}" if own["value"] >= 100 else f"{own['value']:.1f}"
    if not own["quiet_samples"]:
        text += " (noisy)"
    peers = [
        values[(each, scenario)]["value"]
        for each in engines
        if not each.startswith("pellucid:") and (each, scenario) in values
    ]
    if engine.startswith("pellucid:") and peers:
        text += f" ({own['value'] / max(peers):.2f}× the best peer)"
    return text


def _limits_text(limits: list[dict[str, float]]) -> str:
    if not limits:
        return "The machine's limits were not measured."
    medians = {key: statistics.median(each[key] for each in limits) for key in limits[0]}
    highest = max(each["read_gb_s"] for each in limits)
    return (
        f"Beside it: reading memory {medians['read_gb_s']:.1f} GB/s (median; best {highest:.1f}), products of matrices "
        f"{medians['gemm_float32_gflop_s']:.0f} GFLOP/s in float32, {medians['gemm_bfloat16_gflop_s']:.0f} in bfloat16."
    )


def _plot(path: Path, models: dict[str, Any]) -> None:
    figure, axes = pyplot.subplots(1, len(models), figsize=(7 * len(models), 5), squeeze=False)
    for axis, (name, model) in zip(axes[0], models.items(), strict=True):
        scenarios = list(dict.fromkeys(each["scenario"] for each in model["summaries"]))
        engines = list(dict.fromkeys(each["engine"] for each in model["summaries"]))
        width = 0.8 / len(engines)
        for index, engine in enumerate(engines):
            mine = {each["scenario"]: each for each in model["summaries"] if each["engine"] == engine}
            places = [place + index * width for place, scenario in enumerate(scenarios) if scenario in mine]
            heights = [mine[scenario]["value"] for scenario in scenarios if scenario in mine]
            axis.bar(places, heights, width, label=engine)
        axis.set_xticks([place + 0.4 for place in range(len(scenarios))], scenarios)
        axis.set_yscale("log")
        axis.set_ylabel("tokens per second")
        axis.set_title(name)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
