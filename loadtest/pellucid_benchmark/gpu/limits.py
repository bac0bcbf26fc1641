"""What the device can do, measured in the same run: reading its memory, and multiplying matrices."""

from __future__ import annotations

from functools import partial

import torch

from pellucid_benchmark.gpu.clock import fastest

GIGA = 10**9


def measure_limits(device: torch.device) -> dict[str, float]:
    """GB/s of reading 4 GiB, and bfloat16 TFLOP/s of a large product; on a CPU of small ones, to try the check out."""
    on_gpu = device.type == "cuda"
    numbers, size = (2**30, 8192) if on_gpu else (2**22, 256)
    memory = torch.ones(numbers, device=device)
    read = 4 * numbers / fastest(device, memory.sum) / GIGA
    del memory
    matrix = torch.randn(size, size, device=device).bfloat16()
    rate = 2 * size**3 / fastest(device, partial(torch.mm, matrix, matrix)) / GIGA / 1000
    return {"read_gb_s": read, "bfloat16_tflop_s": rate}
