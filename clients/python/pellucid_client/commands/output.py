"""What the commands print, and what becomes of it where nobody can read it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, is_dataclass
from typing import TextIO


class CommandError(Exception):
    """A command cannot do its work; the message says why, in one line."""


def write(text: str) -> None:
    """To standard output, at once. Raises BrokenPipeError where its reader went away, else CommandError."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up(sys.stdout)
        raise
    except OSError as error:
        _give_up(sys.stdout)
        raise CommandError(f"standard output: {error.strerror}") from None


def note(text: str) -> None:
    """A line on standard error, where that can be written."""
    try:
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)


def printable(text: str) -> str:
    """One line that a terminal shows as it is: control characters in names are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(value: object) -> None:
    """One line; dataclasses as objects, bytes as hex."""
    write(json.dumps(value, ensure_ascii=False, default=_jsonable) + "\n")


def _give_up(stream: TextIO) -> None:
    """What is left in its buffer goes nowhere, instead of failing once more when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _jsonable(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")
