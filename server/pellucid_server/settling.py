"""Once a process has started: what only its start needed goes back to the system, in the frontend and in the engine.

Order of side effects: garbage is collected and what is left is never looked at again; memory that was freed goes back;
program code that has run is let go, and what runs again is mapped again from the system's page cache. Nothing here
raises where a system cannot do it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)")


def settle() -> None:
    """To be called once, by a process that is about to serve."""
    gc.collect()
    gc.freeze()  # What is there now stays; going through all modules again and again would cost whole steps.
    give_back_freed()
    let_go_of_code()


def give_back_freed() -> None:
    """Hand memory that was freed back to the system, where the C library can do that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def let_go_of_code() -> None:
    """Unmap program code: torch runs through most of its own once, while it is loaded."""
    with contextlib.suppress(OSError):
        madvise = ctypes.CDLL(None).madvise
        for begin, end in _code(SMAPS.read_text()):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _code(smaps: str) -> Iterator[tuple[int, int]]:
    """Where code lies that is still as its file has it; a page that somebody changed could not be had again."""
    begin = end = 0
    for line in smaps.splitlines():
        if mapping := _MAPPING.fullmatch(line):
            is_code = mapping[3] == "r-xp" and mapping[4].startswith("/")
            begin, end = (int(mapping[1], 16), int(mapping[2], 16)) if is_code else (0, 0)
        elif end and line.split() == ["Anonymous:", "0", "kB"]:
            yield begin, end
