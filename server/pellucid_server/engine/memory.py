"""How much memory there is, control groups included."""

from __future__ import annotations

from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_memory(meminfo: Path = MEMINFO, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Bytes this process may still take: the machine's free memory or what its control group leaves, the smaller."""
    room = [_meminfo_available(meminfo), _cgroup_v2_room(cgroup_root), _cgroup_v1_room(cgroup_root / "memory")]
    return max(0, min(bytes_ for bytes_ in room if bytes_ is not None))


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


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
