"""`python loadtest/memory.py`, and the kinds of memory that it tells apart."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

import memory
from pellucid_benchmark.memory import Resident
from pellucid_benchmark.processes import resident_mib

SIZE = 64 * 2**20


def test_memory_is_told_apart() -> None:
    before = Resident.of(os.getpid())
    assert before.total == pytest.approx(resident_mib([os.getpid()]), rel=0.05)
    assert before.files > 10, "torch's code alone"
    mapping = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(0, SIZE, mmap.PAGESIZE):
        mapping[page] = 1
    after = Resident.of(os.getpid())
    mapping.close()
    assert after.private - before.private == pytest.approx(64, abs=4)
    assert after.huge_pages == pytest.approx(before.huge_pages, abs=4)
    assert after.files == pytest.approx(before.files, abs=4)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memory: ")
    assert "config.json" in line
