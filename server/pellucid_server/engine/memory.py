"""How much memory there is, control groups included, and how much of a GPU's torch has taken."""

from __future__ import annotations

from pathlib import Path

import torch

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
GPU_SECONDS = 1.0
"""How often at most a GPU's memory is asked for: the answer takes as long as a part of a small step."""


def available_memory(meminfo: Path = MEMINFO, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Bytes this process may still take: the machine's free memory or what its control group leaves, the smaller."""
    room = [_meminfo_available(meminfo), _cgroup_v2_room(cgroup_root), _cgroup_v1_room(cgroup_root / "memory")]
    return max(0, min(bytes_ for bytes_ in room if bytes_ is not None))


def out_of_memory(error: torch.OutOfMemoryError) -> str:
    """What to tell the operator: torch's own numbers, in one line, and what helps."""
    numbers = " ".join(str(error).split(" If ")[0].split())
    return f"the GPU's memory is full: {numbers} Lower --kv-cache-memory, --max-step-tokens or --max-running"


class GpuMemory:
    """Bytes that torch holds for tensors, and those it has taken from the GPU; both 0 without one."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._read_at = float("-inf")
        self._bytes = (0, 0)

    def read(self, now: float) -> tuple[int, int]:
        """At most GPU_SECONDS old; `now` is on the monotonic clock."""
        if self._on_gpu and now - self._read_at >= GPU_SECONDS:
            self._read_at = now
            self._bytes = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
        return self._bytes


def _meminfo_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no MemAvailable line")


def _cgroup_v2_room(root: Path) -> int | None:
    return _room(root / "memory.max", root / "memory.current", root / "memory.stat", "inactive_file")


def _cgroup_v1_room(root: Path) -> int | None:
    usage = root / "memory.usage_in_bytes"
    return _room(root / "memory.limit_in_bytes", usage, root / "memory.stat", "total_inactive_file")


def _room(limit: Path, usage: Path, stat: Path, reclaimable: str) -> int | None:
    """Limit less usage, the page cache that the kernel gives back first not counted; None without a limit."""
    try:
        text = limit.read_text().strip()
        if text == "max":
            return None
        used = int(usage.read_text())
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == reclaimable:
                used -= int(value)
        return int(text) - used
    except (OSError, ValueError):
        return None
