"""Finds and loads the compiled kernels: which library fits this CPU, and how many threads its operators use.

In: the libraries that build.py made beside this file, and PELLUCID_KERNELS, which forces one of VARIANTS or "torch".
Out: a ctypes.CDLL shared by every user of the process, or None where there is nothing to load.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

VARIANTS = ("amx", "avx512-bf16", "avx512", "avx2", "portable")
"""Best first; the same names as in build.py."""
WITH_BFLOAT16 = ("amx", "avx512-bf16")
"""Those that multiply bfloat16 as it is; others widen it."""


def supported_variants() -> tuple[str, ...]:
    """The variants that are compiled and that this CPU can run, best first."""
    portable = _path("portable")
    if not portable.exists():
        return ()
    supports = ctypes.CDLL(str(portable)).pellucid_cpu_supports
    supports.argtypes = [ctypes.c_char_p]
    supports.restype = ctypes.c_int
    return tuple(name for name in VARIANTS if _path(name).exists() and supports(name.encode()))


def variant() -> str:
    """The variant in use: one of VARIANTS, or "torch" where no library is.

    Raises ValueError where PELLUCID_KERNELS names something unknown, not compiled or not supported by this CPU.
    """
    accepted = (*supported_variants(), "torch")
    forced = os.environ.get("PELLUCID_KERNELS")
    if not forced:
        return accepted[0]
    if forced not in accepted:
        raise ValueError(f"PELLUCID_KERNELS is {forced!r}; accepted on this machine: {', '.join(accepted)}")
    return forced


def load_library() -> ctypes.CDLL | None:
    """The library of `variant()`, loaded once per process, or None where operators must come from torch."""
    name = variant()
    return None if name == "torch" else load_variant(name)


@functools.cache
def load_variant(name: str) -> ctypes.CDLL:
    """Load one of `supported_variants()`."""
    return ctypes.CDLL(str(_path(name)))


def _path(name: str) -> Path:
    return Path(__file__).with_name(f"_kernels_{name.replace('-', '_')}.so")


_threads = len(os.sched_getaffinity(0))


def threads() -> int:
    """Threads that an operator may use."""
    return _threads


def set_threads(count: int) -> None:
    """Let operators use `count` >= 1 threads; the default is every CPU that this process may run on.

    No result depends on it.
    """
    global _threads
    if count < 1:
        raise ValueError(f"threads must be at least 1, not {count}")
    _threads = count
