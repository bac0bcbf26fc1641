"""What the commands share: options, argument types, input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from pellucid_client._calls import DEFAULT_ADDRESS
from pellucid_client._security import read_token
from pellucid_client._target import target
from pellucid_client.aio import AsyncClient
from pellucid_client.client import Client
from pellucid_client.commands.output import CommandError, note

AnyClient = TypeVar("AnyClient", Client, AsyncClient)

Commands = Any
"""What argparse's add_subparsers returns; it has no public name."""


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    details: str = "",
    each: str = "",
) -> argparse.ArgumentParser:
    """A command that talks to a server, with the options all of them have. `each` says what its timeout is for."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {details}".strip()
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--server",
        type=server_address,
        metavar="HOST:PORT",
        default=os.environ.get("PELLUCID_SERVER") or DEFAULT_ADDRESS,
        help=f"the server (default: the environment's PELLUCID_SERVER, else {DEFAULT_ADDRESS})",
    )
    _add_security(parser.add_argument_group("security"))
    parser.add_argument("--timeout", type=positive_seconds, metavar="SECONDS", help=f"give up {each}after so long")
    return parser


def _add_security(group: argparse._ArgumentGroup) -> None:
    """Each one can come from the environment instead: --token-file from PELLUCID_TOKEN_FILE."""
    group.add_argument(
        "--tls",
        action="store_true",
        default=os.environ.get("PELLUCID_TLS", "").lower() in ("1", "true", "yes", "on"),
        help="encrypt, and check the server's certificate (environment: PELLUCID_TLS=1)",
    )
    for flag, words in (
        ("--ca-certificate", "PEM file of authorities to check it against, instead of the system's"),
        ("--certificate", "PEM file of a client certificate, for servers that want one"),
        ("--key", "PEM file of its private key"),
        ("--token-file", "file whose first line is a bearer token, for servers that want one"),
    ):
        variable = "PELLUCID_" + flag[2:].replace("-", "_").upper()
        group.add_argument(
            flag, metavar="FILE", default=os.environ.get(variable) or None, help=f"{words} (environment: {variable})"
        )


def connect(arguments: argparse.Namespace) -> Client:
    """Raises CommandError for files and addresses that cannot be."""
    return _connected(Client, arguments)


def connect_async(arguments: argparse.Namespace, *, wait_for_room: bool) -> AsyncClient:
    """As `connect`."""
    return _connected(AsyncClient, arguments, wait_for_room=wait_for_room)


def _connected(kind: Callable[..., AnyClient], arguments: argparse.Namespace, **more: object) -> AnyClient:
    try:
        return kind(
            arguments.server,
            tls=arguments.tls,
            ca_certificate=arguments.ca_certificate,
            certificate=arguments.certificate,
            key=arguments.key,
            token=None if arguments.token_file is None else read_token(arguments.token_file),
            **more,
        )
    except ValueError as error:
        raise CommandError(str(error)) from None


def server_address(text: str) -> str:
    try:
        return target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("address: ")) from None


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
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
    require_stdin("standard input")
    if sys.stdin.isatty():
        note("Type the text; Ctrl-D ends it.")
    try:
        return sys.stdin.read().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise CommandError(f"standard input: {error.strerror}") from None


def require_stdin(name: str) -> None:
    """Raises CommandError where there is none, under the name that the user gave it."""
    if sys.stdin is None:
        raise CommandError(f"{name} is closed")
