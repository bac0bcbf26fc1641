"""Builds the image that tests/deploy/test_container.py tries.

Layers are kept: the next build takes seconds where little has changed. So one that runs beforehand, as a script of any
Python, saves the test the time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
IMAGE = "localhost/pellucid-test:latest"
LOCAL_BASE = "localhost/pellucid-test-base:bookworm"
"""What tests/deploy/debian_base.sh makes. Used where it exists, else the Dockerfile's own base."""
SECONDS = 1400

# The docker format keeps HEALTHCHECK.
BUILD = (
    *("buildah", "bud", "--layers", "--isolation=chroot", "--network=host", "--format=docker"),
    *("--volume=/etc/hosts:/etc/hosts:ro", "--build-arg", "VERSION=0.0.0", "--build-arg", "REVISION=tested"),
)


class CannotBuild(Exception):
    """What is missing here for it."""


def build_image() -> None:
    """Makes IMAGE. Raises CannotBuild, or AssertionError where the build itself fails."""
    if os.geteuid() != 0:
        raise CannotBuild("root is needed, to enter the container's network")
    if missing := [tool for tool in ("buildah", "podman", "nsenter") if shutil.which(tool) is None]:
        raise CannotBuild(f"not installed: {', '.join(missing)}")
    command = [*BUILD, *_base_arguments(), *_pip_arguments(), "--tag", IMAGE, "."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"


def _base_arguments() -> list[str]:
    if subprocess.run(["buildah", "inspect", "--type", "image", LOCAL_BASE], capture_output=True).returncode == 0:
        return ["--build-arg", f"BASE={LOCAL_BASE}"]
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    if subprocess.run(["buildah", "pull", "--quiet", base], capture_output=True, timeout=300).returncode != 0:
        raise CannotBuild(f"the base image {base} cannot be pulled, and tests/deploy/debian_base.sh has made none")
    return []


def _pip_arguments() -> list[str]:
    """How pip finds its packages here, handed on to the build."""
    arguments = []
    if certificates := os.environ.get("PIP_CERT"):
        arguments += ["--secret", f"id=ca,src={certificates}", "--build-arg", "PIP_CERT=/run/secrets/ca"]
    if wheels := os.environ.get("PIP_FIND_LINKS"):
        if Path(wheels).is_dir():
            arguments += ["--volume", f"{wheels}:/mnt:ro"]
            wheels = "/mnt"
        arguments += ["--build-arg", f"PIP_FIND_LINKS={wheels}", "--build-arg", "TORCH_INDEX="]
    return arguments


if __name__ == "__main__":
    try:
        build_image()
    except CannotBuild as error:
        sys.exit(str(error))
