"""Reads a pickle of plain values, such as nanoGPT's meta.pkl: dicts, lists, strings, numbers.

Whatever a pickle could run, it first has to name; here every name is refused, so nothing in it can run.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn

from pellucid_model.errors import CheckpointError


class _RefusedError(Exception):
    """A pickle wants more than plain values."""


class _PlainUnpickler(pickle.Unpickler):
    """The standard library's way of restricting what may be named: docs.python.org/3/library/pickle.html."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _RefusedError(f"asks for {module}.{name}")


def read_plain_pickle(path: Path) -> Any:
    """Raises CheckpointError naming the file."""
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except _RefusedError as error:
        raise CheckpointError(f"{path} {error}; only plain values are read, and nothing in it was run") from None
    except Exception as error:  # a broken pickle raises whatever its bytes lead to
        raise CheckpointError(f"{path} is broken or no pickle: {type(error).__name__}") from None


def read_characters(path: Path) -> list[str]:
    """The characters of a nanoGPT meta.pkl in the order of their ids."""
    content = read_plain_pickle(path)
    table = content.get("itos") if isinstance(content, dict) else None
    if not isinstance(table, dict) or sorted(table, key=str) != sorted(range(len(table)), key=str):
        raise CheckpointError(f"{path} has no itos table from 0, 1, 2, … to characters")
    characters = [table[token_id] for token_id in range(len(table))]
    if not all(isinstance(character, str) for character in characters):
        raise CheckpointError(f"{path}: itos holds what is no character")
    return characters
