"""`make bench`: Pellucid through its public API, beside other engines and the machine's own limits, in one run.

usage: bench.py [--model tiny|smollm2|FOLDER]… [--engine NAME:PRECISION]… [--only SCENARIO]… [--rounds N] [--out FOLDER]

Everything runs on this machine, one engine at a time; the others are stopped meanwhile. docs/performance.md explains
what is measured and how to get the peers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pellucid import __version__
from pellucid_benchmark.engines import PEER_ENGINES, Running
from pellucid_benchmark.measuring import measure
from pellucid_benchmark.memory import memory_of
from pellucid_benchmark.models import BenchmarkModel, ModelUnavailable, find_model
from pellucid_benchmark.precisions import PRECISIONS
from pellucid_benchmark.processes import Worker, WorkerError
from pellucid_benchmark.reporting import write_report
from pellucid_benchmark.scenarios import LONG_CONTEXT, SCENARIOS, scenarios_for
from pellucid_benchmark.servers import bundled_start_seconds
from pellucid_benchmark.under_load import NAME as UNDER_LOAD
from pellucid_benchmark.under_load import measure_under_load
from pellucid_loadtest.own_server import leave_in_order_on_sigterm

DEFAULT_ENGINES = {
    "tiny": ("pellucid:float32",),
    "smollm2": ("pellucid:bfloat16", "pellucid:int8", "pellucid:int4"),
}
START = "start"
PARTS = (*(scenario.name for scenario in SCENARIOS), UNDER_LOAD, START)
"""What --only names."""


def main(arguments: Sequence[str]) -> int:
    leave_in_order_on_sigterm()
    options = _options(arguments)
    report: dict[str, Any] = {
        "schema": "pellucid.bench/1",
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "machine": {"processor": _processor(), "threads": options.threads, "python": platform.python_version()},
        "models": {},
    }
    try:
        if START in options.only:
            seconds = [bundled_start_seconds() for _ in range(options.rounds)]
            report["start"] = {"median_seconds": statistics.median(seconds), "seconds": seconds}
        for name in options.model:
            model = find_model(name)
            report["models"][model.name] = _measure(model, options)
            text = write_report(options.out, report)
    except (ModelUnavailable, WorkerError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(text)
    print(f"bench: the report is in {options.out}", file=sys.stderr)
    return 0


def _measure(model: BenchmarkModel, options: argparse.Namespace) -> dict[str, Any]:
    labels = options.engine or DEFAULT_ENGINES.get(model.name, ("pellucid:bfloat16",))
    with contextlib.ExitStack() as stack:
        engines = []
        for label in labels:
            _say(f"loading {label} with {model.name}")
            try:
                engine = Running(label, model, options.threads, options.out / "logs")
            except WorkerError as error:
                _say(f"{label} is left out: {error}")
                continue
            stack.callback(engine.close)
            engines.append(engine)
        if not engines:
            raise ModelUnavailable("no engine could be started")
        return _measure_engines(engines, model, options, stack)


def _measure_engines(
    engines: list[Running], model: BenchmarkModel, options: argparse.Namespace, stack: contextlib.ExitStack
) -> dict[str, Any]:
    log = options.out / "logs" / "limits.log"
    limits = Worker(Path(sys.executable), "run_limits.py", [str(options.threads)], log)
    stack.callback(limits.close)
    scenarios = [each for each in scenarios_for(model.context) if each.name in options.only]
    result = measure(engines, limits, scenarios, options.rounds, _say)
    long = model.context >= LONG_CONTEXT and UNDER_LOAD in options.only
    result["under_load"] = measure_under_load(engines, options.rounds, _say) if long else {}
    most = max((each.streams * (each.prompt_tokens + each.new_tokens) for each in scenarios), default=0)
    result["memory"] = {
        engine.label: memory_of(engine.server, engine.costs, most)
        for engine in engines
        if engine.server and engine.costs
    }
    result["engines"] = {engine.label: engine.worker.about["version"] for engine in engines}
    return result


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    known = [*(f"pellucid:{precision}" for precision in PRECISIONS), *PEER_ENGINES]
    parser = argparse.ArgumentParser(prog="bench.py", description="Measure Pellucid beside other engines.")
    parser.add_argument("--model", action="append", help="tiny, smollm2 or a folder; default: tiny and smollm2")
    parser.add_argument("--engine", action="append", choices=known, metavar="NAME:PRECISION", help=", ".join(known))
    parser.add_argument("--only", action="append", choices=PARTS, metavar="SCENARIO", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured (default 5)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of every engine")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the report")
    options = parser.parse_args(arguments)
    options.model = options.model or ["tiny", "smollm2"]
    options.only = options.only or PARTS
    if options.rounds < 1:
        parser.error("--rounds: must be at least 1")
    return options


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
