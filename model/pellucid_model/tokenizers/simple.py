"""What tokenizers share that cut a text into units of one kind, characters or bytes, and need no library.

In: a table of tokens and up to four special ones. Out: a Tokenizer but for the cutting itself. A special token has a
name (pad, bos, eos, unk) and a spelling; where special tokens are parsed, the longest spelling counts.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pellucid_model.tokenizers.base import TokenizerError, check_text, join_bytes

SPECIAL_NAMES = ("pad", "bos", "eos", "unk")
SPECIAL_TOKENS = {name: f"<{name}>" for name in SPECIAL_NAMES}


class SimpleTokenizer(ABC):
    """table: the bytes of every token by its id; special_ids: ids of the special tokens by their names."""

    def __init__(self, table: Sequence[bytes], special_ids: Mapping[str, int]) -> None:
        self._bytes = tuple(table)
        self.pad_id: int | None = special_ids.get("pad")
        self.bos_id: int | None = special_ids.get("bos")
        self.unk_id: int | None = special_ids.get("unk")
        self.eos_ids: tuple[int, ...] = (special_ids["eos"],) if "eos" in special_ids else ()
        self.special_ids: frozenset[int] = frozenset(special_ids.values())
        self.special_tokens: Mapping[str, int] = {table[i].decode(): i for i in special_ids.values()}
        # Longest first, so that a spelling which begins another one does not hide it.
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.vocab_size: int = len(self._bytes)
        self.sha256: str = hashlib.sha256(self.to_json()).hexdigest()

    @abstractmethod
    def _file(self) -> dict[str, Any]:
        """The content of tokenizer.json."""

    @abstractmethod
    def _encode_plain(self, text: str, offset: int) -> list[int]:
        """Ids of a text without special tokens; it begins at the character `offset` of the whole."""

    def to_json(self) -> bytes:
        """The bytes of the file; the same table always gives the same bytes."""
        return json.dumps(self._file(), ensure_ascii=False, indent=1).encode() + b"\n"

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` into an existing folder."""
        (Path(folder) / "tokenizer.json").write_bytes(self.to_json())

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> list[int]:
        """Token ids; add_special_tokens puts BOS in front. See Tokenizer.encode."""
        check_text(text)
        ids = self._encode_parsed(text) if parse_special_tokens else self._encode_plain(text, 0)
        if add_special_tokens and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """See Tokenizer.encode_pieces."""
        ids: list[int] = []
        for text, parse_special_tokens in pieces:
            ids += self.encode(text, add_special_tokens=False, parse_special_tokens=parse_special_tokens)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer.token_bytes."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, ids: Iterable[int], *, keep_special_tokens: bool = False) -> str:
        """See Tokenizer.decode."""
        return join_bytes(self, ids, keep_special_tokens).decode("utf-8", "replace")

    def _encode_parsed(self, text: str) -> list[int]:
        ids: list[int] = []
        done = 0
        for match in self._special_pattern.finditer(text):
            ids += self._encode_plain(text[done : match.start()], done)
            ids.append(self.special_tokens[match.group()])
            done = match.end()
        return ids + self._encode_plain(text[done:], done)


def check_keys(data: Mapping[str, Any], kind: str, version: int, others: set[str]) -> None:
    """A parsed tokenizer.json has exactly these keys, and the type and version. Raises TokenizerError."""
    expected = {"type", "version", "special_tokens", *others}
    if unknown := sorted(set(data) - expected):
        raise TokenizerError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(expected))}")
    if missing := sorted(expected - set(data)):
        raise TokenizerError(f"key {missing[0]!r} is missing")
    if data["type"] != kind:
        raise TokenizerError(f"type is {data['type']!r}, not {kind!r}")
    if type(data["version"]) is not int or data["version"] != version:
        raise TokenizerError(f"version is {data['version']!r}; this release reads {version}")
    if not isinstance(data["special_tokens"], dict):
        raise TokenizerError("special_tokens must be an object")


def check_special_tokens(special_tokens: Mapping[str, str]) -> None:
    """Known names and usable spellings, none twice. Raises TokenizerError."""
    for name, spelling in special_tokens.items():
        if name not in SPECIAL_NAMES:
            raise TokenizerError(f"special_tokens: unknown name {name!r}; known are {', '.join(SPECIAL_NAMES)}")
        if not isinstance(spelling, str) or len(spelling) < 2 or not is_utf8(spelling):
            raise TokenizerError(
                f"special_tokens.{name} is {spelling!r}; it must be a string of two or more characters"
            )
    spellings = list(special_tokens.values())
    for spelling in spellings:
        if spellings.count(spelling) > 1:
            raise TokenizerError(f"special_tokens: {spelling!r} stands for two tokens")


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8: it holds no lone surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
