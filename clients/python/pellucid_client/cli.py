"""The command `pellucid`.

Owns the list of commands, and what a failed or interrupted command looks like: one line on standard error and an exit
code. 0: done; 1: the server or an input said no; 2: the command line is wrong, or an extra is not installed; 130:
Ctrl-C; 141: whoever read our output went away.

Commands that talk to a server are here; `serve`, `train` and those of other packages are found through the entry-point
group `pellucid.commands`, as functions from the rest of the command line to an exit code. Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper
from typing import NoReturn

from pellucid_client import __version__
from pellucid_client.commands import generate, server, text
from pellucid_client.commands.common import CommandError
from pellucid_client.errors import ConnectionFailed, InvalidRequest, PellucidError

OWN = {"generate", "tokenize", "detokenize", "info", "health", "cancel", "version"}
COMMAND_GROUP = "pellucid.commands"
# Commands that come with an extra of Pellucid itself.
EXTRAS = {"serve": "server", "train": "train"}

INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs one command and exits with its code."""
    _speak_utf8()
    code = _run(sys.argv[1:] if argv is None else argv)
    sys.exit(code)


def _run(argv: list[str]) -> int:
    try:
        code = _run_own(argv) if _is_own(argv) else _run_extra(argv[0], argv[1:])
        sys.stdout.flush()  # Here, where a broken pipe is still caught.
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Nothing is left to fail at exit.
        return BROKEN_PIPE
    except CommandError as error:
        return _fail(str(error))
    except InvalidRequest as error:
        return _fail("; ".join(map(str, error.violations)) or error.message)
    except ConnectionFailed as error:
        return _fail(f"{error.message}. Is `pellucid serve` running there? --server or PELLUCID_SERVER names another.")
    except PellucidError as error:
        return _fail(_described(error))
    return code


def _is_own(argv: list[str]) -> bool:
    return not argv or argv[0].startswith("-") or argv[0] in OWN or not (argv[0] in EXTRAS or _entry_point(argv[0]))


def _run_own(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


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
    _fail(f"`pellucid {name}` is not installed here{without}: pip install 'pellucid[{EXTRAS[name]}]'")
    return 2


def _fail(message: str) -> int:
    print(f"pellucid: {' '.join(message.split())}", file=sys.stderr)
    return 1


def _described(error: PellucidError) -> str:
    parts = [error.message]
    if error.retry_after is not None:
        parts.append(f"try again in {error.retry_after:g} s")
    return f"{'; '.join(parts)} [{error.reason or error.code.name}]"


def _speak_utf8() -> None:
    """Text is UTF-8 whatever the locale says."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="strict" if stream is sys.stdin else "replace")


def _version(arguments: argparse.Namespace) -> int:
    print(f"pellucid {__version__}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pellucid",
        description="Talk to a Pellucid server, or run one.",
        epilog="`pellucid serve` runs a server and `pellucid train` trains a checkpoint; both explain --help.",
    )
    parser.add_argument("--version", action="version", version=f"pellucid {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    generate.add_parser(commands)
    text.add_parsers(commands)
    server.add_parsers(commands)
    commands.add_parser("version", help="print the version").set_defaults(run=_version)
    return parser


if __name__ == "__main__":
    main()
