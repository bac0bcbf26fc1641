"""Free memory as the machine and its control groups tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pellucid_server.engine.memory import available_memory, out_of_memory

GIB = 1 << 30


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    return write(tmp_path, meminfo=f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n") / "meminfo"


def test_without_limits_it_is_the_machine(meminfo: Path, tmp_path: Path) -> None:
    assert available_memory(meminfo, tmp_path / "none") == 8 * GIB
    cgroup = write(tmp_path / "v2", memory__max="max\n", memory__current="1", memory__stat="")
    assert available_memory(meminfo, cgroup) == 8 * GIB


def test_control_group_limits_count_without_reclaimable_pages(meminfo: Path, tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {GIB}\ntotal_inactive_file {GIB}\n"
    v2 = write(tmp_path / "v2", memory__max=str(4 * GIB), memory__current=str(3 * GIB), memory__stat=stat)
    assert available_memory(meminfo, v2) == 2 * GIB
    v1 = tmp_path / "v1"
    write(v1 / "memory", memory__limit_in_bytes=str(2 * GIB), memory__usage_in_bytes=str(2 * GIB), memory__stat=stat)
    assert available_memory(meminfo, v1) == GIB
    full = write(tmp_path / "full", memory__max=str(GIB), memory__current=str(3 * GIB), memory__stat="")
    assert available_memory(meminfo, full) == 0


def test_the_real_machine_has_some() -> None:
    assert available_memory() > 1 << 20


def test_a_full_gpu_is_told_in_one_line_with_its_numbers() -> None:
    numbers = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.1 GiB of which 1.5 GiB is free."
    text = out_of_memory(torch.OutOfMemoryError(f"{numbers}\nIncluding 3 GiB. If reserved memory is large try …"))
    assert numbers in text
    assert "\n" not in text
    assert "If reserved" not in text
    assert text.endswith("Lower --kv-cache-memory, --max-step-tokens or --max-running")
