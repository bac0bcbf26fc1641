"""Compiling the kernels: what is rebuilt, and what is said where it cannot be done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pellucid_model.kernels import build


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one small source and no library."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def test_compiles_then_keeps_what_is_fresh(sources: Path) -> None:
    notices: list[str] = []
    built = build.build(notices.append)
    assert {path.name for path in built} >= {"_kernels_portable.so"}
    assert all(path.exists() for path in built)
    assert len(notices) == len(built)

    assert build.build(notices.append) == built
    assert len(notices) == len(built)

    os.utime(sources / "one.cpp", (2**33, 2**33))
    build.build(notices.append)
    assert len(notices) == 2 * len(built)
    assert not list(sources.parent.glob("*.partial"))


def test_what_does_not_compile_is_left_out(sources: Path) -> None:
    (sources / "one.cpp").write_text("#ifdef __AVX2__\n#error no such luck\n#endif\n")
    notices: list[str] = []
    built = build.build(notices.append)
    assert [path.name for path in built] == ["_kernels_portable.so"]
    assert all("no such luck" in notice for notice in notices[:-1])


@pytest.mark.usefixtures("sources")
def test_missing_compiler_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build(notices.append) == []
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert build.build(notices.append) == []
    assert notices[0].startswith("kernels: CXX=no-such-compiler was not found;")
    assert notices[1].startswith("kernels: no g++, c++ or clang++ on PATH;")


def test_compiler_may_be_a_command_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env g++ -g")
    assert build.find_compiler() == ["env", "g++", "-g"]
