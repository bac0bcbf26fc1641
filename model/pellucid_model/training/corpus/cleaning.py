"""Cleans raw lines step by step, each step a function of its own, and counts what every step took away.

In: lines of any origin. Out: `CleanedCorpus`: distinct lines of permitted length and characters, in their first order.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pellucid_model.training.errors import TrainingError

# Unicode general categories.
_INVISIBLE = {"Cc", "Cf"}  # control characters, zero-width joiners, byte order marks
_ODD = {"Cn", "Co", "Cs", "So"}  # unassigned, private, surrogates, pictographs and U+FFFD

# U+FF10 … U+FF19, U+FF21 … U+FF3A and U+FF41 … U+FF5A to their ASCII twins.
_FULLWIDTH_OFFSET = 0xFEE0
_NARROW = {ord(c) + _FULLWIDTH_OFFSET: c for c in "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"}


@dataclass(frozen=True)
class CleanedCorpus:
    """Lines ready for training, and how many were read and dropped on the way."""

    lines: tuple[str, ...]
    read: int
    too_short: int
    too_long: int
    odd: int
    duplicate: int

    def summary(self) -> str:
        return (
            f"{len(self.lines):,} of {self.read:,} lines kept "
            f"({self.too_short:,} too short, {self.too_long:,} too long, {self.odd:,} with odd characters, "
            f"{self.duplicate:,} duplicates)"
        )


def clean(lines: Iterable[str], min_length: int, max_length: int) -> CleanedCorpus:
    """All steps in order; lengths are in characters, after the characters have been normalised."""
    kept: dict[str, None] = {}
    read = too_short = too_long = odd = duplicate = 0
    for raw in lines:
        line = collapse_whitespace(remove_invisible(normalize(raw)))
        read += 1
        if len(line) < min_length:
            too_short += 1
        elif len(line) > max_length:
            too_long += 1
        elif has_odd_character(line):
            odd += 1
        elif line in kept:
            duplicate += 1
        else:
            kept[line] = None
    return CleanedCorpus(tuple(kept), read, too_short, too_long, odd, duplicate)


def normalize(line: str) -> str:
    """NFC, and full-width letters and digits as ASCII.

    Not NFKC: it would turn the punctuation of Chinese text (，？：) into that of English.
    """
    return unicodedata.normalize("NFC", line).translate(_NARROW)


def remove_invisible(line: str) -> str:
    """Without control and format characters; those that are white space, such as a tab, become a space."""
    if line.isprintable():
        return line
    shown = ((" " if c.isspace() else "") if unicodedata.category(c) in _INVISIBLE else c for c in line)
    return "".join(shown)


def collapse_whitespace(line: str) -> str:
    """Every run of white space, the ideographic space included, as one space; none at the ends."""
    return " ".join(line.split())


def has_odd_character(line: str) -> bool:
    """Whether the line holds a pictograph, U+FFFD, or a code point that is private, unassigned or a surrogate."""
    return any(unicodedata.category(c) in _ODD for c in line)


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file. Raises TrainingError, naming the file and the first bad line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TrainingError(f"corpus {path} cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise TrainingError(
            f"corpus {path} is not UTF-8: line {line} holds the byte 0x{data[error.start]:02x}"
        ) from None
