"""A team of threads (src/parallel.h) under random programs, with fewer processors than threads too: see team.cpp.

What fails names the seed of its program.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pellucid_model.kernels import build

SOURCES = (Path(__file__).with_name("team.cpp"), build.SOURCES / "parallel.cpp")
PROCESSORS = len(os.sched_getaffinity(0))
SEED = 7
FEW_THREADS = 'ulimit -v 150000 && exec "$0" "$@"'
"""Memory for about ten of them, whose stacks take 8 MB each."""


def compiled(folder: Path, *flags: str) -> Path:
    """The program, compiled as the kernels are; skips where that cannot be done."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = folder / "team"
    options = ("-std=c++20", "-g", "-pthread", *flags, f"-I{build.SOURCES}", "-o", str(program))
    command = [*compiler, *options, *map(str, SOURCES)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and flags[0].startswith("-fsanitize"):
        pytest.skip(f"{compiler[0]} has no {flags[0]}")
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("team"), "-O2")


def run(*command: str | Path, threads: int, callers: int, seconds: float) -> None:
    arguments = [str(each) for each in (threads, callers, seconds, SEED)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    programs, units, by_helpers, waits, asides = map(int, re.findall(r"\d+", done.stdout))
    assert programs > 0
    assert 0 < by_helpers < units
    assert waits > 0
    assert asides > 0


@pytest.mark.parametrize(
    ("threads", "callers"), [(max(2, PROCESSORS), 1), (8 * PROCESSORS, 2)], ids=["processors", "many more"]
)
def test_every_unit_is_done_once_and_in_its_round(team: Path, threads: int, callers: int) -> None:
    run(team, threads=threads, callers=callers, seconds=0.5)


def test_a_team_does_with_the_threads_that_it_gets(team: Path) -> None:
    run("sh", "-c", FEW_THREADS, team, threads=64, callers=1, seconds=0.2)


def test_what_units_write_is_handed_on_in_order(tmp_path: Path) -> None:
    """As the thread sanitizer sees it."""
    team = compiled(tmp_path, "-fsanitize=thread", "-O1")
    if subprocess.run([team, "1", "0", "0", "0"], capture_output=True).returncode != 0:
        pytest.skip("the thread sanitizer does not run here")
    run(team, threads=6, callers=2, seconds=0.8)
