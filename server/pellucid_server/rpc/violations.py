"""Gathers all that is wrong with a request, so that one answer names it."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack

from pellucid_server.errors import InvalidRequest, UnsupportedField, Violation
from pellucid_server.options import Option
from pellucid_server.rpc.wire import MAX_LISTED, TRAILER_BYTES


class Violations:
    """Gathers what is wrong; `raise_any` speaks."""

    def __init__(self) -> None:
        self._found: list[Violation] = []
        self._unsupported = False

    def add(self, field: str, description: str) -> None:
        self._found.append(Violation(field, description))

    def unsupported(self, field: str, description: str) -> None:
        self._unsupported = True
        self.add(field, description)

    def check(self, field: str, value: float, option: Option) -> None:
        try:
            option.parse(value)
        except ValueError:
            shown = _float32_text(value) if isinstance(value, float) else str(value)
            self.add(field, f"{shown} is not accepted; accepted: {option.accepts}")

    def check_count(self, field: str, count: int, limit: int, *, least: int = 0) -> None:
        if not least <= count <= limit:
            accepts = f"{least} to {limit}" if least else f"at most {limit}"
            self.add(field, f"has {count} entries; accepted: {accepts}")

    def check_bytes(self, field: str, text: str, least: int, most: int) -> None:
        """The length of a text as UTF-8."""
        size = len(text.encode())
        if not least <= size <= most:
            accepts = f"{least} to {most} bytes" if least else f"at most {most} bytes"
            self.add(field, f"is {size} bytes long; accepted: {accepts}")

    def check_ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        if ids and not max(ids) < vocab_size:
            index, token_id = next((i, t) for i, t in enumerate(ids) if not t < vocab_size)
            self.add(f"{field}[{index}]", f"{token_id} is not accepted; accepted: token ids from 0 to {vocab_size - 1}")

    def raise_any(self) -> None:
        """Raises UnsupportedField if a field cannot be served at all, else InvalidRequest, else nothing."""
        if self._found:
            kind = UnsupportedField if self._unsupported else InvalidRequest
            raise kind(self._listed())

    def _listed(self) -> list[Violation]:
        """As many as an answer has room for, and one at the least."""
        listed, room = self._found[:1], TRAILER_BYTES - _trailer_bytes(self._found[0])
        for violation in self._found[1:MAX_LISTED]:
            room -= _trailer_bytes(violation)
            if room < 0:
                break
            listed.append(violation)
        return listed


def _trailer_bytes(violation: Violation) -> int:
    """It stands in the status message, where a byte beyond ASCII takes three, and twice in the details."""
    text = f"{violation.field} {violation.description}".encode()
    return 3 * len(text) + 2 * sum(byte >= 0x80 for byte in text)


def _float32_text(value: float) -> str:
    """The fewest digits, from 6 on, that tell a float32 apart from all others: 1.0000001 is not 1."""
    texts = [f"{value:.{digits}g}" for digits in (6, 7, 8, 9)]
    return next((text for text in texts if unpack("f", pack("f", float(text)))[0] == value), texts[-1])
