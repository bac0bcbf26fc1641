"""Build hook: compiles the C++ kernels into the package when a wheel or an editable install is made."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "model/pellucid_model/kernels"


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs kernels/build.py, by its path since the package cannot be imported yet, and takes what it made along."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if _load_build(Path(self.root, KERNELS, "build.py")).build(notice=self.app.display_info):
            # Tied to the platform, but to no Python version: the libraries do not link against Python.
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"].append(f"{KERNELS}/*.so")


def _load_build(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pellucid_kernels_build", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
