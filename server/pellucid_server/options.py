"""The kinds of values that settings take: how each is read, and what it accepts, in words.

One `parse` per kind serves the command line and the environment (text) and TOML (text or numbers) alike. A value that
is not accepted raises ValueError; the caller says where it came from.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

AUTO = "auto"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)", re.IGNORECASE)


class Option(Protocol):
    """A kind of value."""

    @property
    def accepts(self) -> str:
        """The accepted values, to follow "accepted: "."""
        ...

    def parse(self, value: object) -> object:
        """The typed value. Raises ValueError where it is not accepted."""
        ...


@dataclass(frozen=True)
class Integer:
    """A whole number in [low, high]; with `auto`, also the word "auto", which reads 0."""

    low: int
    high: int
    auto: bool = False
    power_of_two: bool = False

    @property
    def accepts(self) -> str:
        kind = "a power of two" if self.power_of_two else "a whole number"
        return f"{kind} from {self.low} to {self.high}" + (', or "auto"' if self.auto else "")

    def parse(self, value: object) -> int:
        if self.auto and value == AUTO:
            return 0
        number = _whole(value)
        if not self.low <= number <= self.high or (self.power_of_two and number.bit_count() != 1):
            raise ValueError
        return number


@dataclass(frozen=True)
class Size:
    """Bytes: a number with an optional unit, such as 512MiB, 2GiB or 1e9."""

    low: int
    high: int
    auto: bool = False

    @property
    def accepts(self) -> str:
        return f"bytes from {size_text(self.low)} to {size_text(self.high)}, such as 512MiB, 2GiB or 1e9" + (
            ', or "auto"' if self.auto else ""
        )

    def parse(self, value: object) -> int:
        if self.auto and value == AUTO:
            return 0
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        match = _SIZE.fullmatch(str(value).strip())
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError
        number = int(float(match[1]) * _UNITS[match[2].upper()])
        if not self.low <= number <= self.high:
            raise ValueError
        return number


@dataclass(frozen=True)
class Number:
    """A finite number in [low, high]; `open_low` and `open_high` leave that end itself out."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    @property
    def accepts(self) -> str:
        return f"a number in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"

    def parse(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        number = float(value)
        if not self.holds(number):
            raise ValueError
        return number

    def holds(self, number: float) -> bool:
        """Whether the number is accepted; NaN never is."""
        above = self.low < number if self.open_low else self.low <= number
        below = number < self.high if self.open_high else number <= self.high
        return above and below and math.isfinite(number)


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def accepts(self) -> str:
        return " or ".join(self.words) if len(self.words) < 3 else ", ".join(self.words)

    def parse(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError
        return value


@dataclass(frozen=True)
class Switch:
    """on or off; TOML's own true and false too."""

    @property
    def accepts(self) -> str:
        return "on or off"

    def parse(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        if value not in ("on", "off"):
            raise ValueError
        return value == "on"


@dataclass(frozen=True)
class Text:
    """Any text that is not empty."""

    what: str

    @property
    def accepts(self) -> str:
        return self.what

    def parse(self, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError
        return value


@dataclass(frozen=True)
class FileName(Text):
    """The name of a file, which is read later."""


@dataclass(frozen=True)
class NameInFile(Text):
    """A class of a Python file: FILE.py:CLASS."""

    def parse(self, value: object) -> str:
        text = super().parse(value)
        file, _, name = text.rpartition(":")
        if not file or not name.isidentifier():
            raise ValueError
        return text


@dataclass(frozen=True)
class Address:
    """Where to listen. An IPv6 host is written in brackets; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


@dataclass(frozen=True)
class ListenAddress:
    """HOST:PORT; with `may_be_off`, "off" or 0 reads None."""

    may_be_off: bool = False

    @property
    def accepts(self) -> str:
        return "HOST:PORT with a port from 0 (any free one) to 65535, such as 127.0.0.1:50051 or [::]:50051" + (
            ', or "off"' if self.may_be_off else ""
        )

    def parse(self, value: object) -> Address | None:
        if self.may_be_off and str(value) in ("off", "0"):
            return None
        if not isinstance(value, str):
            raise ValueError
        host, colon, port = value.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        if not colon or not host or (":" in host) != bracketed or not port.isascii() or not port.isdigit():
            raise ValueError
        if not int(port) <= 65535:
            raise ValueError
        return Address(host, int(port))


def size_text(size: int) -> str:
    """Bytes for reading: 1536 -> "1.5KiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g}{unit}"
        value /= 1024
    return f"{value:.4g}TiB"


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError
    return int(value)
