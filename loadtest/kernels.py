"""How fast the operators are on this machine: linear layers in every format, by number of rows.

usage: kernels.py [--shapes 3072x576,576x1536] [--rows 1,8,32,512] [--formats bfloat16,int8,int4] [--threads N]

For each it prints the least and the median time of interleaved runs, the multiplications' rate (two operations each)
and the rate at which weights are read. Weights are taken in turn from copies that together pass the caches, as in a
model. Figures of a busy machine mean little; the least time suffers least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import get_args

import torch

from pellucid_benchmark.arguments import sizes, whole_numbers, words
from pellucid_model.kernels import NativeKernels, PackedLinear, WeightFormat, library

BEYOND_CACHE = 96 << 20
"""Bytes of weights that a timed sequence of calls goes through."""
SECONDS = 0.5
"""For each shape and number of rows, all formats together."""


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.threads:
        library.set_threads(options.threads)
    kernels = NativeKernels(library.variant())
    print(f"{kernels.name}, {library.threads()} threads")
    for outputs, inputs in options.shapes:
        weight = torch.randn(outputs, inputs) * 0.05
        layers = {format: _copies(kernels, weight, format) for format in options.formats}
        for rows in options.rows:
            times = _interleaved(kernels, torch.randn(rows, inputs), layers)
            for format, each in times.items():
                print(_line(outputs, inputs, rows, format, each, layers[format][0].weight.nbytes), flush=True)
    return 0


def _copies(kernels: NativeKernels, weight: torch.Tensor, format: WeightFormat) -> list[PackedLinear]:
    first = kernels.pack_linear(weight, None, format)
    return [first] + [
        kernels.pack_linear(weight, None, format) for _ in range(min(60, BEYOND_CACHE // first.weight.nbytes))
    ]


def _interleaved(
    kernels: NativeKernels, x: torch.Tensor, layers: dict[WeightFormat, list[PackedLinear]]
) -> dict[WeightFormat, list[float]]:
    times: dict[WeightFormat, list[float]] = {format: [] for format in layers}
    end, turn = time.perf_counter() + SECONDS, 0
    while turn < 5 or time.perf_counter() < end:
        for format, copies in layers.items():
            start = time.perf_counter()
            kernels.linear(x, copies[turn % len(copies)])
            times[format].append(time.perf_counter() - start)
        turn += 1
    return times


def _line(outputs: int, inputs: int, rows: int, format: str, times: list[float], weight_bytes: int) -> str:
    least = min(times)
    return (
        f"{outputs:>6} x {inputs:<5} rows {rows:<5} {format:<9} {least * 1e6:9.1f} us least "
        f"{statistics.median(times) * 1e6:9.1f} median {2 * rows * outputs * inputs / least / 1e9:7.0f} Gop/s "
        f"{weight_bytes / least / 1e9:6.1f} GB/s"
    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kernels.py", description="How fast the operators are on this machine.")
    parser.add_argument(
        "--shapes",
        type=sizes(2),
        default=[(3072, 576), (576, 1536), (960, 576), (49152, 576)],
        help="OUTPUTSxINPUTS,…; default: the layers of a 135M model",
    )
    parser.add_argument("--rows", type=whole_numbers, default=[1, 8, 32, 512])
    parser.add_argument("--formats", type=words(get_args(WeightFormat)), default=list(get_args(WeightFormat)))
    parser.add_argument("--threads", type=int, default=0, help="default: the cores this process may use")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
