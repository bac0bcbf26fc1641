"""Worker for what the machine can do, with as many threads as the engines have: read bandwidth and matrix products.

Memory is read in huge pages where Linux has them. Products are torch's; those of int8 add up in int32.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from pellucid_model.kernels.huge_pages import untouched_zeros

GIGABYTE = 10**9
_WORDS = 2**27
"""512 MiB of float32, far more than any cache holds."""
_SIZE = 2048


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    memory = untouched_zeros((_WORDS,), torch.float32).fill_(1)
    matrix = torch.randn(_SIZE, _SIZE)
    whole = torch.randint(-127, 128, (_SIZE, _SIZE), dtype=torch.int8)
    products = {
        "float32": partial(torch.mm, matrix, matrix),
        "bfloat16": partial(torch.mm, matrix.bfloat16(), matrix.bfloat16()),
        "int8": partial(torch._int_mm, whole, whole),
    }
    print(json.dumps({"ready": {"name": "limits", "version": torch.__version__, "vocab_size": 0}}), flush=True)
    for _ in sys.stdin:
        rates = {"read_gb_s": 4 * _WORDS / _fastest(memory.sum, 4) / GIGABYTE}
        for name, product in products.items():
            rates[f"gemm_{name}_gflop_s"] = 2 * _SIZE**3 / _fastest(product, 2) / GIGABYTE
        print(json.dumps(rates), flush=True)


def _fastest(function: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


main()
