"""The bearer tokens that are accepted, from a file that is read again when it changes.

One token a line, with a name behind it if it has one: "mF_9.B5f-4.1JqM  # alice". Blank lines and lines that begin
with # are passed over. Tokens of one name belong to one caller, so that a token can be replaced by a new one beside it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from pathlib import Path

from pellucid_server.errors import StartError
from pellucid_server.logs import log
from pellucid_server.tls import version

CHECK_SECONDS = 1.0
"""How often at most the file is looked at."""

# RFC 6750, section 2.1.
_LINE = re.compile(r"(?P<token>[A-Za-z0-9\-._~+/]+=*)(?:\s+#\s*(?P<name>.*))?")


class TokenFile:
    """Raises StartError where the file cannot be used at the start; later what was read before stays in force."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = version(path)
        self._callers = _read(path)
        self._checked_at = time.monotonic()

    def caller(self, token: str) -> str | None:
        """Whose token it is; None: nobody's. Takes the same time for every token that is not known."""
        self._follow()
        digest, found = _digest(token), None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def reload(self) -> None:
        """Reads the file again, changed or not."""
        self._version = version(self._path)
        try:
            self._callers = _read(self._path)
        except StartError as error:
            log(logging.ERROR, f"{error}; the tokens read before stay in force")
        else:
            log(logging.INFO, "the tokens have been read again", tokens=len(self._callers))

    def _follow(self) -> None:
        now = time.monotonic()
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            if version(self._path) != self._version:
                self.reload()


def _read(path: Path) -> dict[bytes, str]:
    """Callers by the digests of their tokens. Messages never show a token."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StartError(f"--auth-token-file {path}: {error.strerror}; name a readable file") from None
    except UnicodeDecodeError:
        raise StartError(f"--auth-token-file {path}: is not UTF-8 text") from None
    callers = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise StartError(
                f"--auth-token-file {path}: line {number} is no token; accepted: letters, digits and -._~+/ without "
                "blanks, then perhaps # and a name"
            )
        digest = _digest(match["token"])
        callers[digest] = match["name"] or digest.hex()
    if not callers:
        raise StartError(f"--auth-token-file {path}: holds no token; write one a line")
    return callers


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
