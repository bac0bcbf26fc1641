"""One part of the check: `python -m pellucid_benchmark.gpu PART cuda|cpu`. Each finding is a line of JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch


def main(part: str, device_name: str) -> int:
    device = torch.device(device_name)
    if device.type == "cpu":
        torch.set_num_threads(1)
    with torch.inference_mode():
        for finding in findings(part, device):
            print(json.dumps(finding), flush=True)
    return 0


def findings(part: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Of "device", "correctness", "limits", or "SHAPE ENGINE" with the engines "graphs", "plain" and "transformers"."""
    if part == "device":
        yield _device(device)
    elif part == "correctness":
        from pellucid_benchmark.gpu.correctness import check_all

        for check in check_all(device):
            error = check.error if math.isfinite(check.error) else None  # JSON has no infinity
            yield asdict(check) | {"error": error, "held": check.held}
    elif part == "limits":
        from pellucid_benchmark.gpu.limits import measure_limits

        yield measure_limits(device)
    else:
        shape, engine = part.split()
        from pellucid_benchmark.gpu.speed import QUICK, Plan, measure_speed

        plan = QUICK if shape == "tiny" else Plan()
        if engine == "transformers":
            from pellucid_benchmark.gpu.peer import measure_peer

            yield from measure_peer(shape, device, plan)
        else:
            yield from measure_speed(shape, device, plan, graphs=engine == "graphs")


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"name": "cpu", "torch": torch.__version__}
    if not torch.cuda.is_available():
        return {"name": None, "torch": torch.__version__}
    free, total = torch.cuda.mem_get_info(device)
    name, gib = torch.cuda.get_device_name(device), 2**30
    return {"name": name, "free_gib": free / gib, "total_gib": total / gib, "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
