"""The commands that talk to a server: their command line, and what is said where one of them fails."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from pellucid_client import __version__
from pellucid_client.commands import chat, generate, server, text
from pellucid_client.commands.output import CommandError, printable, write
from pellucid_client.errors import ConnectionFailed, InvalidRequest, PellucidError, Unauthenticated


def run_own(argv: list[str], others: Mapping[str, str]) -> int:
    """The command's exit code. `others`: commands that are only in the help, each with its summary.

    Raises CommandError where it fails.
    """
    arguments = _parser(others).parse_args(argv)
    if sys.stdout is None:
        raise CommandError("standard output is closed")
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except PellucidError as error:
        raise CommandError(_described(error)) from None


def _described(error: PellucidError) -> str:
    match error:
        case InvalidRequest(violations=violations) if violations:
            return "; ".join(map(str, violations))
        case InvalidRequest():
            return error.message
        case ConnectionFailed():
            return f"{error.message}. Is `pellucid serve` running there? --server or PELLUCID_SERVER names another."
        case Unauthenticated():
            return f"{error.message}. --token-file or PELLUCID_TOKEN_FILE names a file with a token."
    wait = "" if error.retry_after is None else f"; try again in {error.retry_after:g} s"
    return f"{error.message}{wait} [{error.reason or error.code.name}]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}; --help tells what is accepted\n")


def _parser(others: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="pellucid", description="Talk to a Pellucid server, or run one.")
    parser.add_argument("--version", action="version", version=f"pellucid {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in others.items():
        commands.add_parser(name, help=summary)
    generate.add_parser(commands)
    chat.add_parser(commands)
    text.add_parsers(commands)
    server.add_parsers(commands)
    commands.add_parser("version", help="print the version").set_defaults(run=_version)
    return parser


def _version(arguments: argparse.Namespace) -> int:
    write(f"pellucid {__version__}\n")
    return 0
