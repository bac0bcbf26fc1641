"""What a process gives back once it has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from pellucid_server.settling import _code, give_back_freed, let_go_of_code


def kibibytes(field: str) -> int:
    """Of this process, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def test_freed_memory_goes_back() -> None:
    held = [bytes([i % 256]) * 100_000 for i in range(400)]  # 40 MB in pieces that come from the heap
    last = held.pop()  # keeps the heap from being cut at its end
    held.clear()
    before = kibibytes("RssAnon")
    give_back_freed()
    assert before - kibibytes("RssAnon") > 20_000
    assert len(last) == 100_000


def test_code_is_let_go_and_comes_back() -> None:
    x = torch.eye(8)
    before = kibibytes("RssFile")
    let_go_of_code()
    assert before - kibibytes("RssFile") > 20_000, "torch alone has run through more"
    assert torch.equal(x @ x, x)


def test_only_unchanged_code_is_let_go() -> None:
    smaps = """\
1000-3000 r-xp 00000000 fd:00 11 /lib/whole.so
Anonymous:             0 kB
5000-6000 r-xp 00000000 fd:00 12 /lib/patched by hand.so
Anonymous:             4 kB
7000-8000 rw-p 00000000 fd:00 13 /lib/data.so
Anonymous:             0 kB
9000-a000 r-xp 00000000 00:00 0 [vdso]
Anonymous:             0 kB
b000-c000 r-xs 00000000 00:01 14 /memfd:shared
Anonymous:             0 kB
d000-e000 r-xp 00000000 fd:00 15 /lib/with a space.so
Anonymous:             0 kB
"""
    assert list(_code(smaps)) == [(0x1000, 0x3000), (0xD000, 0xE000)]


def test_a_process_settles() -> None:
    program = "import gc; from pellucid_server.settling import settle; settle(); print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1000
    assert done.stderr == ""
