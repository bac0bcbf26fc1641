"""Worker for what the machine can do, with as many threads as the engines have: read bandwidth and matrix products."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

GIGABYTE = 10**9
_WORDS = 2**28
"""1 GiB of float32, far more than any cache holds."""
_SIZE = 2048


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    memory = torch.ones(_WORDS)
    matrices = {dtype: torch.randn(_SIZE, _SIZE).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(json.dumps({"ready": {"name": "limits", "version": torch.__version__, "vocab_size": 0}}), flush=True)
    for _ in sys.stdin:
        rates = {"read_gb_s": 4 * _WORDS / _fastest(memory.sum) / GIGABYTE}
        for dtype, matrix in matrices.items():
            seconds = _fastest(partial(torch.mm, matrix, matrix))
            rates[f"gemm_{str(dtype).removeprefix('torch.')}_gflop_s"] = 2 * _SIZE**3 / seconds / GIGABYTE
        print(json.dumps(rates), flush=True)


def _fastest(function: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


main()
