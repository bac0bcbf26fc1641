"""Checks and measures the engine on a GPU, in at most 8 minutes. gpu_check.sh starts it.

usage: gpu_check.py [--output gpu_check.json] [--device cuda|cpu] [--quick] [--parts PART,PART…]

Each part runs in a process of its own, since a fault on a GPU takes its process with it, and for a limited time. What a
part has found is written to the file as soon as it ends, however it ends. --device cpu --quick tries the check itself,
with slow twins and a tiny shape, where there is nothing to measure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 470
"""For everything; what begins later is left out."""
PARTS = {
    "correctness": 150,
    "limits": 40,
    "135M graphs": 60,
    "1.1B graphs": 60,
    "8B graphs": 90,
    "135M plain": 45,
    "135M transformers": 60,
    "1.1B transformers": 60,
    "8B transformers": 90,
}
"""The most important first, with the seconds that each may take."""
QUICK_PARTS = {"correctness": 120, "limits": 30, "tiny graphs": 30, "tiny plain": 30, "tiny transformers": 60}
HELD, FAILED, NO_GPU = 0, 1, 2

Report = dict[str, dict[str, Any]]
"""By part: its findings, the seconds that it took, and its error or None."""


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    deadline = time.monotonic() + SECONDS
    report: Report = {"device": run(command_of("device", options.device), 60)}
    device = (report["device"]["findings"] or [{"name": None}])[0]
    if device["name"] is None:
        reason = report["device"]["error"] or f"torch {device['torch']} finds no CUDA device"
        print(f"gpu_check: no GPU here: {reason}; --device cpu --quick tries the check itself", file=sys.stderr)
        return NO_GPU
    for part, most in options.parts.items():
        left = deadline - time.monotonic()
        print(f"{part} …", file=sys.stderr, flush=True)
        command = command_of(part, options.device)
        report[part] = run(command, min(most, left)) if left > 1 else _part([], 0.0, "no time left")
        _write(options.output, report)
    print(table(report))
    print(f"\nall findings: {options.output}")
    return HELD if held(report) else FAILED


def command_of(part: str, device: str) -> list[str]:
    return [sys.executable, "-m", "pellucid_benchmark.gpu", part, device]


def run(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a part and keep what it said, however it ends."""
    began = time.monotonic()
    error: str | None = None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as trouble:
        process = subprocess.Popen(command, stdout=out, stderr=trouble, cwd=Path(__file__).parent)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            error = f"not done after {seconds:.0f} seconds"
        out.seek(0)
        trouble.seek(0)
        lines, said = out.read().splitlines(), trouble.read().strip()
    if error is None and code != 0:
        error = said.splitlines()[-1] if said else f"ended with {code}"
    return _part([json.loads(line) for line in lines if line.endswith("}")], time.monotonic() - began, error)


def _part(findings: list[dict[str, Any]], seconds: float, error: str | None) -> dict[str, Any]:
    return {"findings": findings, "seconds": round(seconds, 1), "error": error}


def held(report: Report) -> bool:
    """Whether every check was made, and held."""
    part = report.get("correctness")
    if part is None or part["error"] is not None or not part["findings"]:
        return False
    return all(check["held"] for check in part["findings"])


def table(report: Report) -> str:
    """What was found, for people."""
    device = report["device"]["findings"][0]
    lines = [f"{device['name']}, torch {device['torch']}", ""]
    for part, found in report.items():
        if part == "correctness":
            lines += [_check_line(check) for check in found["findings"]]
        elif part == "limits":
            lines += ["", *(f"{name}: {value:.1f}" for each in found["findings"] for name, value in each.items()), ""]
            lines.append(
                f"{'shape, engine':22}{'streams':>9}{'step ms':>10}{'tokens/s':>12}{'GB/s':>9}{'of limit':>10}"
            )
        elif part != "device":
            lines += [line for finding in found["findings"] if (line := _speed_line(part, finding, _bandwidth(report)))]
        if found["error"] is not None:
            lines.append(f"{part}: {found['error']}")
    return "\n".join(lines)


def _check_line(check: dict[str, Any]) -> str:
    error = "      none" if check["error"] is None else f"{check['error']:10.2g}"
    verdict = "held" if check["held"] else "FAILED"
    note = f"   {check['note']}" if check["note"] else ""
    return f"{verdict:7}{check['name']:32} off by {error}, allowed {check['allowed']:g}{note}"


def _speed_line(part: str, finding: dict[str, Any], bandwidth: float | None) -> str | None:
    if "streams" in finding:
        read = finding.get("read_gb_s")
        share = "" if read is None or not bandwidth else f"{100 * read / bandwidth:.0f} %"
        rate = "" if read is None else f"{read:.0f}"
        row = f"{part:22}{finding['streams']:9}{finding['step_ms']:10.2f}{finding['tokens_s']:12.0f}"
        return f"{row}{rate:>9}{share:>10}"
    if "prefill" in finding:
        return f"{part:22}{'prefill':>9}{finding['prefill']:10}{finding['tokens_s']:12.0f}"
    if "peak_gib" in finding:
        return f"{part:22}   memory {finding['all_gib']:.2f} GiB, at most {finding['peak_gib']:.2f} GiB taken"
    return "\n".join(f"{part}: {notice}" for notice in finding.get("notices", [])) or None


def _bandwidth(report: Report) -> float | None:
    findings = report.get("limits", {}).get("findings") or [{}]
    rate: float | None = findings[0].get("read_gb_s")
    return rate


def _write(file: Path, report: Report) -> None:
    """Whole or not at all, so that what is there can be read at any time."""
    fresh = file.with_suffix(".part")
    fresh.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    fresh.replace(file)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Check and measure the engine on a GPU.")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="default: gpu_check.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, to try the check itself")
    parser.add_argument("--parts", help="only these, with commas between; default: all")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu is there to try the check itself; add --quick")
    known = QUICK_PARTS if options.quick else PARTS
    wanted = list(known) if options.parts is None else options.parts.split(",")
    if unknown := [part for part in wanted if part not in known]:
        parser.error(f"--parts: {unknown[0]!r} is none; accepted: {', '.join(known)}")
    options.parts = {part: known[part] for part in wanted}
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
