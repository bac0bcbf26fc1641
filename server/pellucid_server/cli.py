"""`pellucid serve`: settings, then the frontend. Every failure to start is one line and an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from pellucid_server.checkpoint_info import read_checkpoint_info
from pellucid_server.errors import StartError
from pellucid_server.frontend import Frontend, Package
from pellucid_server.logs import log, set_up_logging
from pellucid_server.settings import SettingsError, load_settings, unknown_variables


def serve_command(argv: Sequence[str]) -> int:
    """Serves until SIGTERM or SIGINT. Exit code 0 after an orderly end, 1 where it cannot start, 2 for bad settings."""
    try:
        settings = load_settings(argv)
    except SettingsError as error:
        return _complain(str(error), 2)
    set_up_logging(settings.log_level, settings.log_format)
    for name in unknown_variables(os.environ):
        log(logging.WARNING, "an environment variable is no setting of this server and has no effect", variable=name)
    try:
        asyncio.run(_serve(Package(settings, read_checkpoint_info(settings), metadata.version("pellucid"))))
    except StartError as error:
        return _complain(str(error), 1)
    except PermissionError as error:
        return _complain(f"{error.filename} cannot be read: {error.strerror}; look at its owner and mode", 1)
    return 0


async def _serve(package: Package) -> None:
    await Frontend(package).run()


def _complain(message: str, code: int) -> int:
    print(f"pellucid serve: {message}", file=sys.stderr)
    return code
