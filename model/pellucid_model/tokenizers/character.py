"""A tokenizer with one token per character.

It owns `tokenizer.json` of the type "pellucid.character":

    {"type": "pellucid.character", "version": 1,
     "special_tokens": {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"},
     "characters": ["a", "b", …]}

Ids number the special tokens first, always in the order pad, bos, eos, unk, then the characters. A table may lack any
of the special tokens. A character here is one Unicode code point.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pellucid_model.tokenizers.base import TokenizerError, UnknownCharacterError, check_text, join_bytes

TYPE = "pellucid.character"
VERSION = 1
SPECIAL_NAMES = ("pad", "bos", "eos", "unk")
SPECIAL_TOKENS = {name: f"<{name}>" for name in SPECIAL_NAMES}


class CharacterTokenizer:
    """See the module. `characters` and `special_tokens` are the two tables of the file.

    Raises TokenizerError for a table that breaks the rules; the message names the entry.
    """

    def __init__(self, characters: Sequence[str], special_tokens: Mapping[str, str] = SPECIAL_TOKENS) -> None:
        _check_special_tokens(special_tokens)
        _check_characters(characters)
        self._special_tokens = {name: special_tokens[name] for name in SPECIAL_NAMES if name in special_tokens}
        self._characters = tuple(characters)

        spellings = tuple(self._special_tokens.values())
        named = {name: token_id for token_id, name in enumerate(self._special_tokens)}
        self.pad_id: int | None = named.get("pad")
        self.bos_id: int | None = named.get("bos")
        self.unk_id: int | None = named.get("unk")
        self.eos_ids: tuple[int, ...] = (named["eos"],) if "eos" in named else ()
        self.special_ids: frozenset[int] = frozenset(range(len(spellings)))

        self._bytes = tuple(token.encode() for token in (*spellings, *self._characters))
        self._character_ids = {c: i for i, c in enumerate(self._characters, start=len(spellings))}
        self._special_ids_by_spelling = {spelling: i for i, spelling in enumerate(spellings)}
        # Longest first, so that a spelling which begins another one does not hide it.
        longest_first = sorted(spellings, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first))) if spellings else None
        self.vocab_size: int = len(self._bytes)
        self.sha256: str = hashlib.sha256(self.to_json()).hexdigest()

    @classmethod
    def train(cls, lines: Iterable[str]) -> CharacterTokenizer:
        """A table of every character that occurs in the lines, in code point order, and all four special tokens."""
        characters: set[str] = set()
        for line in lines:
            check_text(line)
            characters.update(line)
        return cls(sorted(characters))

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "tokenizer.json") -> CharacterTokenizer:
        """Read the parsed file. Raises TokenizerError, beginning with `where`."""
        try:
            _check_file(data)
            return cls(data["characters"], data["special_tokens"])
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}") from None

    def to_json(self) -> bytes:
        """The bytes of the file; the same table always gives the same bytes."""
        data = {
            "type": TYPE,
            "version": VERSION,
            "special_tokens": self._special_tokens,
            "characters": list(self._characters),
        }
        return json.dumps(data, ensure_ascii=False, indent=1).encode() + b"\n"

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` into an existing folder."""
        (Path(folder) / "tokenizer.json").write_bytes(self.to_json())

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> list[int]:
        """Token ids; add_special_tokens puts BOS in front. See Tokenizer.encode."""
        check_text(text)
        if parse_special_tokens and self._special_pattern is not None:
            ids = self._encode_with_special_tokens(text, self._special_pattern)
        else:
            ids = self._encode_plain(text, 0)
        if add_special_tokens and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer.token_bytes."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, ids: Iterable[int], *, keep_special_tokens: bool = False) -> str:
        """See Tokenizer.decode."""
        return join_bytes(self, ids, keep_special_tokens).decode()

    def _encode_with_special_tokens(self, text: str, pattern: re.Pattern[str]) -> list[int]:
        ids: list[int] = []
        done = 0
        for match in pattern.finditer(text):
            ids += self._encode_plain(text[done : match.start()], done)
            ids.append(self._special_ids_by_spelling[match.group()])
            done = match.end()
        return ids + self._encode_plain(text[done:], done)

    def _encode_plain(self, text: str, offset: int) -> list[int]:
        table, unknown = self._character_ids, self.unk_id
        if unknown is not None:
            return [table.get(character, unknown) for character in text]
        try:
            return [table[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise UnknownCharacterError(character, offset + text.index(character)) from None


def _check_file(data: Mapping[str, Any]) -> None:
    expected = {"type", "version", "special_tokens", "characters"}
    if unknown := sorted(set(data) - expected):
        raise TokenizerError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(expected))}")
    if missing := sorted(expected - set(data)):
        raise TokenizerError(f"key {missing[0]!r} is missing")
    if data["type"] != TYPE:
        raise TokenizerError(f"type is {data['type']!r}, not {TYPE!r}")
    if type(data["version"]) is not int or data["version"] != VERSION:
        raise TokenizerError(f"version is {data['version']!r}; this release reads {VERSION}")
    if not isinstance(data["special_tokens"], dict):
        raise TokenizerError("special_tokens must be an object")
    if not isinstance(data["characters"], list):
        raise TokenizerError("characters must be a list")


def _check_special_tokens(special_tokens: Mapping[str, str]) -> None:
    for name, spelling in special_tokens.items():
        if name not in SPECIAL_NAMES:
            raise TokenizerError(f"special_tokens: unknown name {name!r}; known are {', '.join(SPECIAL_NAMES)}")
        if not isinstance(spelling, str) or len(spelling) < 2 or not _is_utf8(spelling):
            raise TokenizerError(
                f"special_tokens.{name} is {spelling!r}; it must be a string of two or more characters"
            )
    spellings = list(special_tokens.values())
    for spelling in spellings:
        if spellings.count(spelling) > 1:
            raise TokenizerError(f"special_tokens: {spelling!r} stands for two tokens")


def _check_characters(characters: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for index, character in enumerate(characters):
        if not isinstance(character, str) or len(character) != 1 or not _is_utf8(character):
            raise TokenizerError(f"characters[{index}] is {character!r}; it must be one character")
        if character in seen:
            raise TokenizerError(f"characters[{index}] repeats {character!r} of characters[{seen[character]}]")
        seen[character] = index


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
