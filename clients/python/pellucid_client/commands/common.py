"""What the commands share: options, argument types, output."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

from pellucid_client._calls import DEFAULT_ADDRESS
from pellucid_client.client import Client

Commands = Any
"""What argparse's add_subparsers returns; it has no public name."""


class CommandError(Exception):
    """An input is unusable; the message says which and why, in one line."""


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str, details: str = ""
) -> argparse.ArgumentParser:
    """A command that talks to a server, with the options all of them have."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {details}".strip()
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        default=os.environ.get("PELLUCID_SERVER") or DEFAULT_ADDRESS,
        help=f"the server (default: the environment's PELLUCID_SERVER, else {DEFAULT_ADDRESS})",
    )
    parser.add_argument("--timeout", type=positive_seconds, metavar="SECONDS", help="give up after so long")
    return parser


def connect(arguments: argparse.Namespace) -> Client:
    return Client(arguments.server)


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds greater than 0")
    return seconds


def positive_count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number greater than 0")
    return int(text)


def token_ids(text: str) -> list[int]:
    """ "1,2,3" -> [1, 2, 3]"""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def read_text(given: str | None) -> str:
    """The argument, or standard input for "-" and for none; its last line break is not part of the text."""
    if given is not None and given != "-":
        return given
    if sys.stdin.isatty():
        print("Type the text; Ctrl-D ends it.", file=sys.stderr)
    try:
        return sys.stdin.read().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None


def print_json(value: object) -> None:
    """One line; dataclasses as objects, bytes as hex."""
    print(json.dumps(value, ensure_ascii=False, default=_jsonable), flush=True)


def _jsonable(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")
