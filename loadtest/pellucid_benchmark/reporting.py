"""The report of a benchmark: bench.json with every sample, tables in Markdown, a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from pellucid_benchmark.comparing import Medians, aims, is_peer, precision_of

matplotlib.use("Agg")
from matplotlib import pyplot


def write_report(folder: Path, report: dict[str, Any]) -> str:
    """Write bench.json, bench.md and bench.png; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    parts = [part for name, model in report["models"].items() for part in _model_parts(name, model)]
    text = "\n\n".join([*parts, *_aims_part(report)]) + "\n"
    (folder / "bench.md").write_text(text)
    _plot(folder / "bench.png", report["models"])
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def _model_parts(name: str, model: dict[str, Any]) -> list[str]:
    medians = Medians(model)
    parts = [f"### {name}"]
    if medians.engines:
        parts += [_values(model, medians), _limits_text(model)]
    if any(is_peer(engine) for engine in medians.engines):
        parts.append(_ratios(medians))
    if any(each["share"] is not None for each in model["summaries"]):
        parts.append(_shares(model))
    if model["under_load"]:
        parts.append(_under_load(model["under_load"]))
    if model["memory"]:
        parts.append(_memory(model["memory"]))
    parts += [f"{what} failed: {why}" for what, why in model["failures"].items()]
    return parts


def _values(model: dict[str, Any], medians: Medians) -> str:
    cells = {(each["engine"], each["scenario"]): each for each in model["summaries"]}
    rows = []
    for engine in medians.engines:
        mine = [cells.get((engine, scenario)) for scenario in medians.scenarios]
        first = f"{mine[0]['first_ms']:.1f}" if mine[0] else ""
        rows.append([engine, *map(_value, mine), first, f"{model['resident_mib'][engine]:.0f}"])
    text = "Tokens per second, the median of quiet runs. TTFT and RSS in ms and MiB.\n\n"
    return text + table(["engine", *medians.scenarios, "TTFT", "RSS"], rows)


def _value(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    text = f"{cell['value']:.0f}" if cell["value"] >= 100 else f"{cell['value']:.1f}"
    return text if cell["quiet_samples"] else f"{text} (noisy)"


def _limits_text(model: dict[str, Any]) -> str:
    limits: list[dict[str, float]] = model["limits"]
    medians = {key: statistics.median(each[key] for each in limits) for key in limits[0]}
    highest = max(each["read_gb_s"] for each in limits)
    noisy = sum(each["samples"] - each["quiet_samples"] for each in model["summaries"])
    total = sum(each["samples"] for each in model["summaries"])
    return (
        f"Beside it: reading memory {medians['read_gb_s']:.1f} GB/s (median; best {highest:.1f}), products of matrices "
        f"{medians['gemm_float32_gflop_s']:.0f} GFLOP/s in float32, {medians['gemm_bfloat16_gflop_s']:.0f} in "
        f"bfloat16, {medians['gemm_int8_gflop_s']:.0f} in int8. {total} runs, {noisy} of them noisy and left out where "
        "quiet ones exist."
    )


def _ratios(medians: Medians) -> str:
    rows = []
    for engine in (each for each in medians.engines if not is_peer(each)):
        same = f"best {precision_of(engine)}"
        pairs = [[medians.ratio(engine, each, against) for against in (same, "best")] for each in medians.scenarios]
        rows.append([engine, *(" / ".join(f"{each:.2f}" if each else "–" for each in pair) for pair in pairs)])
    text = "Ratio to the best peer of the same precision / of any precision.\n\n"
    return text + table(["engine", *medians.scenarios], rows)


def _shares(model: dict[str, Any]) -> str:
    shares = {(each["engine"], each["scenario"]): each["share"] for each in model["summaries"] if each["share"]}
    scenarios = list(dict.fromkeys(scenario for _, scenario in shares))
    engines = list(dict.fromkeys(engine for engine, _ in shares))
    percents = [
        [f"{100 * shares[engine, each]:.0f} %" if (engine, each) in shares else "" for each in scenarios]
        for engine in engines
    ]
    text = "Share of the limit measured around each run: bytes that are read (decode), multiplications (prefill).\n\n"
    return text + table(["engine", *scenarios], ([engine, *row] for engine, row in zip(engines, percents, strict=True)))


def _under_load(engines: dict[str, dict[str, float]]) -> str:
    keys = ("idle_median_ms", "idle_p99_ms", "loaded_median_ms", "loaded_p99_ms", "longest_step_ms")
    rows = [
        [engine, *(f"{times[key]:.1f}" for key in keys), f"{times['loaded_to_allowed']:.2f}"]
        for engine, times in engines.items()
    ]
    text = "Time to the first token of short prompts, alone and while long prompts prefill, in ms.\n\n"
    head = ["engine", "alone, median", "alone, p99", "under load, median", "under load, p99", "longest step"]
    return text + table([*head, "p99 / (2 × p99 alone + step)"], rows)


def _memory(engines: dict[str, dict[str, float]]) -> str:
    rows = [
        [engine, *(f"{memory[key]:.0f}" for key in ("resident_mib", "weights_mib", "kv_cache_mib"))]
        for engine, memory in engines.items()
    ]
    text = "Memory of frontend and engine after all runs, in MiB. KV cache: as far as it was used.\n\n"
    return text + table(["engine", "resident", "weights", "KV cache"], rows)


def _aims_part(report: dict[str, Any]) -> list[str]:
    rows = [
        [each.what, f"{each.measured:.2f}{each.unit}", f"{'≤' if each.at_most else '≥'} {each.aim:g}{each.unit}"]
        for each in aims(report)
    ]
    return ["### Aims", table(["figure", "measured", "aim"], rows)] if rows else []


def _plot(path: Path, models: dict[str, Any]) -> None:
    figure, axes = pyplot.subplots(1, len(models), figsize=(7 * len(models), 5), squeeze=False)
    for axis, (name, model) in zip(axes[0], models.items(), strict=True):
        scenarios = list(dict.fromkeys(each["scenario"] for each in model["summaries"]))
        engines = list(dict.fromkeys(each["engine"] for each in model["summaries"]))
        width = 0.8 / max(1, len(engines))
        for index, engine in enumerate(engines):
            mine = {each["scenario"]: each for each in model["summaries"] if each["engine"] == engine}
            places = [place + index * width for place, scenario in enumerate(scenarios) if scenario in mine]
            heights = [mine[scenario]["value"] for scenario in scenarios if scenario in mine]
            axis.bar(places, heights, width, label=engine)
        axis.set_xticks([place + 0.4 for place in range(len(scenarios))], scenarios)
        axis.set_yscale("log")
        axis.set_ylabel("tokens per second")
        axis.set_title(name)
        if engines:
            axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
