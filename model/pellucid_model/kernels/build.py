"""Compiles the C++ kernels: every src/*.cpp into one shared library per CPU variant, beside this file.

Runs as the package's build hook (hatch_build.py loads this file by its path, so it needs nothing but the standard
library) and by hand, which rebuilds everything:

    python -m pellucid_model.kernels.build

The compiler is $CXX, else the first of g++, c++ and clang++ on PATH. A missing compiler or a variant that does not
compile is a notice, never an error: the package then runs on the variants it has, or on torch operators.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"

# No contraction: a multiply-add is fused where the source says so and nowhere else, whatever the compiler.
FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-fPIC", "-shared"),
    *("-fvisibility-inlines-hidden", "-Wno-psabi"),
)


@dataclass(frozen=True)
class Variant:
    """One compilation of the sources. `machine` is None where every architecture can compile it."""

    name: str
    flags: tuple[str, ...] = ()
    machine: str | None = None

    @property
    def path(self) -> Path:
        return HERE / f"_kernels_{self.name.replace('-', '_')}.so"


_AVX512_BF16 = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")

VARIANTS = (
    Variant("amx", (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), "x86_64"),
    Variant("avx512-bf16", _AVX512_BF16, "x86_64"),
    Variant("avx512", ("-march=x86-64-v4", "-mavx512vnni"), "x86_64"),
    Variant("avx2", ("-march=x86-64-v3",), "x86_64"),
    Variant("portable"),
)
"""Best first. library.py picks the first one that the CPU supports."""


def find_compiler() -> list[str] | None:
    """The compiler command, or None where there is none."""
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen)
        return command if command and shutil.which(command[0]) else None
    return next(([name] for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def build(notice: Callable[[str], None], force: bool = False) -> list[Path]:
    """Compile what is missing or older than the sources, or everything with `force`.

    Returns the libraries that are there afterwards. `notice` receives one message per thing worth knowing.
    """
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    variants = [variant for variant in VARIANTS if variant.machine in (None, machine)]
    stale = [variant for variant in variants if force or not _is_fresh(variant.path)]
    compiler = find_compiler()
    if stale and compiler is None:
        where = f"CXX={os.environ['CXX']} was not found" if os.environ.get("CXX") else "no g++, c++ or clang++ on PATH"
        notice(f"kernels: {where}; Pellucid will use torch operators, which are slower and not batch-invariant")
    elif compiler is not None:
        with ThreadPoolExecutor(max_workers=2) as pool:
            for message in pool.map(lambda variant: _compile(compiler, variant), stale):
                notice(message)
    return [variant.path for variant in variants if variant.path.exists()]


def _is_fresh(library: Path) -> bool:
    inputs = [*SOURCES.iterdir(), Path(__file__)]
    return library.exists() and library.stat().st_mtime >= max(path.stat().st_mtime for path in inputs)


def _compile(compiler: list[str], variant: Variant) -> str:
    """Compile one variant beside its final place, then rename: a running process keeps the file it has mapped."""
    partial = variant.path.with_suffix(f".{os.getpid()}.partial")
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    command = [*compiler, *FLAGS, *variant.flags, "-o", str(partial), *sources]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        variant.path.unlink(missing_ok=True)
        return f"kernels: variant {variant.name} did not compile and is left out:\n{done.stderr.strip()}"
    partial.replace(variant.path)
    return f"kernels: compiled {variant.name} with {compiler[0]}"


if __name__ == "__main__":
    sys.exit(0 if build(notice=print, force=True) else 1)
