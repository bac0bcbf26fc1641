"""Imports point one way, nobody pays for torch who does not use it, and the wheel holds what it needs."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import pellucid_client

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = [ROOT / path for path in PYPROJECT["tool"]["hatch"]["build"]["packages"]]
GRPC = {"grpc", "google", "grpc_status", "grpc_health", "grpc_reflection"}

# Package -> the first-party packages it may import.
MAY_IMPORT = {
    "pellucid": {"pellucid"},
    "pellucid_client": {"pellucid", "pellucid_client"},
    "pellucid_model": {"pellucid_model"},
    "pellucid_server": {"pellucid", "pellucid_model", "pellucid_server"},
}


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level name) of every import, those inside functions included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]


def third_party(package: Path, files: str = "*.py") -> set[str]:
    names = {name for file in package.rglob(files) for _, name in imports_of(file)}
    return names - set(sys.stdlib_module_names) - set(MAY_IMPORT)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_imports_point_one_way(package: Path) -> None:
    files = list(package.rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imports_of(file)
        if name in MAY_IMPORT and name not in MAY_IMPORT[package.name]
    ]
    assert wrong == []


def test_the_client_needs_its_base_dependencies_alone() -> None:
    assert third_party(ROOT / "clients/python/pellucid_client") == {"grpc", "grpc_status", "google"}


def test_the_model_knows_nothing_of_serving() -> None:
    served = GRPC | {"msgspec", "prometheus_client"}
    assert third_party(ROOT / "model/pellucid_model") & served == set()
    assert "torch" not in third_party(ROOT / "model/pellucid_model/tokenizers")


def loaded_after(*modules: str) -> set[str]:
    """Top-level names that a fresh interpreter has loaded once it has imported `modules`."""
    script = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    path = os.pathsep.join(str(package.parent) for package in PACKAGES)
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(run.stdout.split())


HEAVY = {"torch", "numpy", "transformers"}
ENGINE = ("pellucid_server.engine.", "pellucid_server.verify.")


def test_the_client_leaves_torch_unloaded() -> None:
    loaded = loaded_after("pellucid_client.client", "pellucid_client.aio", "pellucid_client.commands.dispatch")
    assert "grpc" in loaded
    assert loaded & (HEAVY | {"tokenizers", "msgspec"}) == set()


def test_the_frontend_leaves_torch_unloaded() -> None:
    """All of the server but the engine, which runs in a process of its own, and the command that looks into it."""
    server = ROOT / "server/pellucid_server"
    names = [".".join(file.relative_to(server.parent).with_suffix("").parts) for file in sorted(server.rglob("*.py"))]
    modules = [name.removesuffix(".__init__") for name in names if not name.startswith(ENGINE)]
    loaded = loaded_after(*modules, "pellucid_server.engine.messages", "pellucid_model.tokenizers")
    assert "pellucid_server.frontend" in modules
    assert loaded & HEAVY == set()


def test_every_package_is_listed_once() -> None:
    rooms = ["proto", "model", "server", "clients/python"]
    found = {file.parent for room in rooms for file in (ROOT / room).rglob("__init__.py")}
    roots = {folder for folder in found if folder.parent not in found}
    # pellucid.v1 lies inside pellucid; a room itself is never a package.
    assert roots == set(PACKAGES)
    assert all((package / "py.typed").is_file() for package in PACKAGES)


def test_extras_cover_what_is_imported() -> None:
    """A package that code imports is a dependency that pyproject.toml names."""
    project = PYPROJECT["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    named += project["optional-dependencies"]["train"]
    distributions = {name.split(">")[0].replace("-", "_") for name in named}
    providers = {"grpc": "grpcio", "google": "protobuf", "grpc_health": "grpcio_health_checking"}
    providers["grpc_reflection"] = "grpcio_reflection"
    providers["grpc_status"] = "grpcio_status"
    imported = {name for package in PACKAGES for name in third_party(package)}
    assert {providers.get(name, name) for name in imported} <= distributions


def test_entry_points_lead_somewhere() -> None:
    project = PYPROJECT["project"]
    targets = [*project["scripts"].values(), *project["entry-points"]["pellucid.commands"].values()]
    assert len(targets) >= 3
    for target in targets:
        assert callable(EntryPoint("", target, "").load())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that the tree's own kernels stay as they are."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ["pyproject.toml", "README.md", "LICENSE", "hatch_build.py", ".gitignore"]:
        shutil.copy2(ROOT / name, source)
    for package in PACKAGES:
        skipped = shutil.ignore_patterns("__pycache__", "*.partial")
        shutil.copytree(package, source / package.relative_to(ROOT), ignore=skipped)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source,
        capture_output=True,
        timeout=600,
        check=True,
    )
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*MAY_IMPORT, f"pellucid-{pellucid_client.__version__}.dist-info"}
    sources = {
        str(file.relative_to(package.parent))
        for package in PACKAGES
        for pattern in ("*.py", "*.pyi", "*.proto", "py.typed")
        for file in package.rglob(pattern)
    }
    assert len(sources) > 50
    assert sources <= names


@pytest.mark.slow
def test_the_wheel_holds_the_demo_checkpoint(wheel: zipfile.ZipFile) -> None:
    demo = {
        info.filename: info.file_size for info in wheel.infolist() if info.filename.startswith("pellucid_model/demo/")
    }
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert demo[f"pellucid_model/demo/{name}"] > 0
    assert sum(demo.values()) < 2.5 * 2**20
    assert json.loads(wheel.read("pellucid_model/demo/config.json"))


@pytest.mark.slow
def test_the_wheel_holds_kernels_where_there_is_a_compiler(wheel: zipfile.ZipFile) -> None:
    libraries = [
        name for name in wheel.namelist() if name.startswith("pellucid_model/kernels/") and name.endswith(".so")
    ]
    if shutil.which("g++") is None:
        pytest.skip("no compiler here")
    assert libraries


@pytest.mark.slow
def test_the_wheels_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"pellucid-{pellucid_client.__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Version"] == pellucid_client.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    base = {line.split(">")[0] for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line}
    assert base == {"grpcio", "grpcio-status", "protobuf"}
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "pellucid = pellucid_client.cli:main" in entry_points
    assert "serve = pellucid_server.cli:serve_command" in entry_points
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
