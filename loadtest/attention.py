"""How fast attention over the paged KV cache is on this machine, by the cache's format.

usage: attention.py [--heads 9x3x64] [--layers 30] [--decode 1x200,8x1500] [--prefill 512] [--formats bfloat16,int8]
                    [--block-size 128] [--threads N]

--heads QxKVxD: query heads, kv heads, head dimension. --decode ROWSxCONTEXT: a step in which each of ROWS sequences
reads CONTEXT keys. --prefill N: a prompt of N tokens in one step. Times are those of a whole step's attention, all
layers, each with a cache of its own; the least and the median of interleaved runs. Figures of a busy machine mean
little; the least time suffers least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from pellucid_benchmark.arguments import sizes, whole_numbers, words
from pellucid_model.kernels import NativeKernels, library
from pellucid_model.kernels.cache_layout import INT8, stored_width
from pellucid_model.kernels.huge_pages import untouched_zeros

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": INT8}
SECONDS = 1.0
"""For each case, all formats together."""


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.threads:
        library.set_threads(options.threads)
    kernels = NativeKernels(library.variant())
    print(f"{kernels.name}, {library.threads()} threads, {options.layers} layers")
    cases = [(f"decode {rows} x {context}", rows, context, 1) for rows, context in options.decode]
    cases += [(f"prefill {length}", 1, length, length) for length in options.prefill]
    for name, sequences, context, new in cases:
        steps = {each: _step(kernels, options, FORMATS[each], sequences, context, new) for each in options.formats}
        for each, times in _interleaved(steps).items():
            print(
                f"{name:<16} {each:<9} {min(times) * 1e3:8.2f} ms least {statistics.median(times) * 1e3:8.2f} median",
                flush=True,
            )
    return 0


def _step(
    kernels: NativeKernels, options: argparse.Namespace, dtype: torch.dtype, sequences: int, context: int, new: int
) -> Callable[[], None]:
    """A call that runs all layers' attention of `new` tokens at the end of each sequence's `context`."""
    heads, kv_heads, dim = options.heads
    blocks = -(-context // options.block_size)
    shape = (sequences * blocks, kv_heads, options.block_size, stored_width(dim, dtype))
    caches = [(untouched_zeros(shape, dtype), untouched_zeros(shape, dtype)) for _ in range(options.layers)]
    tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()

    def run(count: int) -> None:
        rows = torch.arange(sequences, dtype=torch.int32).repeat_interleave(count)
        positions = torch.arange(context - count, context, dtype=torch.int32).repeat(sequences)
        for keys, values in caches:
            kernels.paged_attention(
                q[: len(rows)],
                k[: len(rows)],
                v[: len(rows)],
                keys,
                values,
                row_sequence=rows,
                positions=positions,
                block_tables=tables,
                scale=dim**-0.5,
            )

    q, k, v = (torch.randn(sequences * context, count, dim) for count in (heads, kv_heads, kv_heads))
    run(context)  # fills the cache
    return lambda: run(new)


def _interleaved(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attention.py", description="How fast attention over the KV cache is.")
    parser.add_argument("--heads", type=lambda text: sizes(3)(text)[0], default=(9, 3, 64), help="QxKVxD")
    parser.add_argument("--layers", type=int, default=30)
    cases = [(rows, context) for context in (200, 1500) for rows in (1, 8, 32)]
    parser.add_argument("--decode", type=sizes(2), default=cases, help="ROWSxCONTEXT,…")
    parser.add_argument("--prefill", type=whole_numbers, default=[512, 1900])
    parser.add_argument("--formats", type=words(FORMATS), default=["bfloat16", "int8"])
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="default: the cores this process may use")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
