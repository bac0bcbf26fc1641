"""Where the memory of a server is, in each precision: after the start, and after each load of `make bench`.

usage: memory.py [MODEL] [--precision NAME]… [--threads N]

MODEL: smollm2 (default), tiny or a checkpoint folder. Starts one server after the other and prints a table in MiB; aim
is 1.3 times the weights + the used KV cache + 400 MiB, where tokens are counted, not blocks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from pellucid_benchmark.comparing import MEMORY_AIM_MIB
from pellucid_benchmark.costs import costs_of
from pellucid_benchmark.engines import Running
from pellucid_benchmark.memory import MIB, Resident
from pellucid_benchmark.models import BenchmarkModel, ModelUnavailable, find_model
from pellucid_benchmark.precisions import PRECISIONS
from pellucid_benchmark.processes import WorkerError
from pellucid_benchmark.scenarios import scenarios_for
from pellucid_loadtest.own_server import leave_in_order_on_sigterm

HEADER = """\
| precision | after | frontend: private | files | engine: huge pages | private | files | together | aim |
|---|---|---|---|---|---|---|---|---|"""


def main(arguments: Sequence[str]) -> int:
    leave_in_order_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--precision", action="append", choices=list(PRECISIONS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    try:
        model = find_model(options.model)
        print(HEADER)
        for precision in options.precision or ("bfloat16", "int8", "int4"):
            for row in _rows(model, precision, options.threads):
                print(row, flush=True)
    except (ModelUnavailable, WorkerError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    return 0


def _rows(model: BenchmarkModel, precision: str, threads: int) -> Iterator[str]:
    """Lines of the table."""
    costs, most_tokens = costs_of(model.folder, precision), 0
    with TemporaryDirectory() as logs:
        engine = Running(f"pellucid:{precision}", model, threads, Path(logs))
        try:
            yield _row(precision, "start", engine.serving_pids, "")
            for scenario in scenarios_for(model.context):
                prompts = scenario.prompts(engine.worker.about["vocab_size"], 0)
                engine.worker.ask({"prompts": prompts, "new": scenario.new_tokens})
                most_tokens = max(most_tokens, scenario.streams * (scenario.prompt_tokens + scenario.new_tokens))
                aim = (1.3 * costs.weight_bytes + most_tokens * costs.kv_token_bytes) / MIB + MEMORY_AIM_MIB
                yield _row(precision, scenario.name, engine.serving_pids, f"{aim:.0f}")
        finally:
            engine.close()


def _row(precision: str, after: str, pids: Sequence[int], aim: str) -> str:
    frontend, engine = (Resident.of(pid) for pid in pids)
    kinds = (frontend.private, frontend.files, engine.huge_pages, engine.private, engine.files)
    numbers = (*kinds, frontend.total + engine.total)
    return " | ".join((f"| {precision}", after, *(f"{number:.0f}" for number in numbers), f"{aim} |"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
