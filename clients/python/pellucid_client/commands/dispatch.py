"""From the words of a command line to an exit code.

Owns which command a command line means. Those that talk to a server are in `own`; `serve`, `train` and those of other
packages are found through the entry-point group `pellucid.commands`, as functions from the rest of the command line to
an exit code. Neither gRPC nor torch is loaded here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points, requires
from io import TextIOWrapper

from pellucid_client.cli import INTERRUPTED
from pellucid_client.commands.output import CommandError, note, write

OWN = {"generate", "chat", "tokenize", "detokenize", "info", "health", "cancel", "version"}
COMMAND_GROUP = "pellucid.commands"
BROKEN_PIPE = 141


@dataclass(frozen=True)
class Extra:
    """A command that comes with an extra of Pellucid itself."""

    extra: str
    summary: str


EXTRAS = {
    "serve": Extra("server", "run a server"),
    "train": Extra("train", "train a checkpoint"),
    "doctor": Extra("train", "look a model and its training over for the classic faults"),
    "inspect": Extra("train", "save what each token of a text looks at and what would come next"),
    "convert": Extra("server", "make a folder that serves of any checkpoint"),
    "verify": Extra("server", "prove that what is served equals the model's own forward"),
}
_REQUIREMENT = re.compile(r"([\w.-]+).*;.*\bextra == ['\"](.+?)['\"]")


def run(argv: list[str]) -> int:
    """Runs one command."""
    # Before gRPC is loaded: what fails is told by us, and its own log lines would stand beside that.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _open_standard_streams()
    try:
        code = _exit_code(argv)
        if sys.stdout is not None:
            write("")  # Here, where what is still buffered may fail.
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE
    except CommandError as error:
        return _fail(str(error))
    return code


def _exit_code(argv: list[str]) -> int:
    try:
        return _run_own(argv) if _is_own(argv) else _run_extra(argv[0], argv[1:])
    except SystemExit as end:
        if isinstance(end.code, str):
            return _fail(end.code)
        return end.code or 0


def _is_own(argv: list[str]) -> bool:
    return not argv or argv[0].startswith("-") or argv[0] in OWN or not (argv[0] in EXTRAS or _entry_point(argv[0]))


def _run_own(argv: list[str]) -> int:
    from pellucid_client.commands.own import run_own

    return run_own(argv, {} if argv[:1] in [[name] for name in OWN] else _others())


def _others() -> dict[str, str]:
    """The names of all other commands, each with its summary."""
    summaries = {}
    for name, extra in EXTRAS.items():
        summaries[name] = extra.summary + ("" if _is_installed(name) else f" (needs pellucid[{extra.extra}])")
    for entry in entry_points(group=COMMAND_GROUP):
        summaries.setdefault(entry.name, "comes with another package")
    return summaries


def _run_extra(name: str, rest: list[str]) -> int:
    command = _entry_point(name)
    if command is None:
        return _missing_extra(name)
    try:
        run: Callable[[list[str]], int] = command.load()
        return run(rest)
    except ModuleNotFoundError as error:
        if name not in EXTRAS or (error.name or "").startswith("pellucid"):
            raise
        return _missing_extra(name, error.name)


def _entry_point(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=COMMAND_GROUP, name=name)), None)


def _missing_extra(name: str, module: str | None = None) -> int:
    without = f" ({module} is missing)" if module else ""
    extra = EXTRAS[name].extra
    _fail(
        f"`pellucid {name}` is not installed here{without}: it needs pellucid[{extra}]; "
        f"in a checkout of Pellucid: pip install '.[{extra}]'"
    )
    return 2


def _is_installed(name: str) -> bool:
    """Whether the command of an extra can run here, by what is installed: nothing is loaded."""
    try:
        matches = map(_REQUIREMENT.match, requires("pellucid") or [])
        for package in [match[1] for match in matches if match and match[2] == EXTRAS[name].extra]:
            distribution(package)
    except PackageNotFoundError:
        return False
    return _entry_point(name) is not None


def _fail(message: str) -> int:
    note(f"pellucid: {' '.join(message.split())}")
    return 1


def _open_standard_streams() -> None:
    """Text is UTF-8 whatever the locale says, and no connection takes the place of a stream that is closed."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest one that is free.
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="strict" if stream is sys.stdin else "replace")
