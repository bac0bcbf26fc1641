"""Time on a device: what is handed to a GPU has not happened yet when the call returns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def now(device: torch.device) -> float:
    """Seconds, once all that was handed to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fastest(device: torch.device, function: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest call, after one that is not counted."""
    function()
    seconds = []
    for _ in range(times):
        began = now(device)
        function()
        seconds.append(now(device) - began)
    return min(seconds)
