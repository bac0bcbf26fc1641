"""How the cost of a step grows with the batch, the context and the model: a table and a plot, in a few minutes.

usage: growth.py [--precision bfloat16] [--rounds 3] [--threads N] [--out runs/growth]

A server for each of five shapes with random weights, asked through gRPC. What counts is the time that the engine gives
its own steps, the median over rounds; the client runs on the same processors. Contexts above 2,048 tokens roll. Runs in
which others took more than 7 % of the processors are left out where quiet ones exist.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from pellucid_benchmark.costs import costs_of
from pellucid_benchmark.growing import Point, points, step_seconds
from pellucid_benchmark.growth_report import Growth, write_growth
from pellucid_benchmark.precisions import PRECISIONS
from pellucid_benchmark.processes import WorkerError, watching
from pellucid_benchmark.random_models import SHAPES, write_random_llama
from pellucid_benchmark.servers import PellucidServer
from pellucid_loadtest.own_server import leave_in_order_on_sigterm


def main(arguments: Sequence[str]) -> int:
    leave_in_order_on_sigterm()
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        servers = {}
        for model in options.model:
            print(f"starting {model}", file=sys.stderr, flush=True)
            folder = Path(made, model)
            write_random_llama(folder, SHAPES[model], torch.float32 if model == "tiny" else torch.bfloat16)
            try:
                server = PellucidServer(folder, options.precision, options.threads, ["--max-running", "64"])
            except WorkerError as error:
                print(f"growth: {error}", file=sys.stderr)
                return 2
            stack.callback(server.close)
            servers[model] = server
        costs = {model: costs_of(Path(made, model), options.precision) for model in servers}
        seconds = _measure(servers, options.rounds)
    growth = Growth(options.precision, options.threads, costs, seconds)
    print(write_growth(options.out, growth))
    print(f"growth: the report is in {options.out}", file=sys.stderr)
    return 0


def _measure(servers: dict[str, PellucidServer], rounds: int) -> dict[Point, float]:
    """Medians over the rounds that were quiet, or over all where none was."""
    quiet: dict[Point, list[float]] = {}
    every: dict[Point, list[float]] = {}
    for number in range(rounds):
        for point in points(list(servers)):
            server = servers[point.model]
            with watching([server.pid, os.getpid()]) as load:
                seconds = asyncio.run(step_seconds(server, point, random.Random(f"{point} {number}")))
            every.setdefault(point, []).append(seconds)
            if load.quiet:
                quiet.setdefault(point, []).append(seconds)
            what = f"{point.model:5} {point.kind:8} {point.batch:3d} × {point.context:5d}"
            print(f"{number + 1:3d}  {what} {1000 * seconds:9.2f} ms{load.remark}", file=sys.stderr, flush=True)
    return {point: statistics.median(quiet.get(point) or all_of_it) for point, all_of_it in every.items()}


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="growth.py", description="Measure how the cost of a step grows.")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bfloat16", help="default bfloat16")
    parser.add_argument("--model", action="append", choices=tuple(SHAPES), help="default: all of them")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (default 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of the engines")
    parser.add_argument("--out", type=Path, default=Path("runs/growth"), help="folder of the report")
    options = parser.parse_args(arguments)
    options.model = options.model or list(SHAPES)
    if options.rounds < 1:
        parser.error("--rounds: must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
