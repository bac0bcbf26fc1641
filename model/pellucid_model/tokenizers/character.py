"""A tokenizer with one token per character.

It owns `tokenizer.json` of the type "pellucid.character":

    {"type": "pellucid.character", "version": 1,
     "special_tokens": {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"},
     "characters": ["a", "b", …]}

Ids number the special tokens first, always in the order pad, bos, eos, unk, then the characters. A table may lack any
of the special tokens. A character here is one Unicode code point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pellucid_model.tokenizers.base import TokenizerError, UnknownCharacterError, check_text
from pellucid_model.tokenizers.simple import (
    SPECIAL_NAMES,
    SPECIAL_TOKENS,
    SimpleTokenizer,
    check_keys,
    check_special_tokens,
    is_utf8,
)

TYPE = "pellucid.character"
VERSION = 1


class CharacterTokenizer(SimpleTokenizer):
    """See the module. `characters` and `special_tokens` are the two tables of the file.

    Raises TokenizerError for a table that breaks the rules; the message names the entry.
    """

    def __init__(self, characters: Sequence[str], special_tokens: Mapping[str, str] = SPECIAL_TOKENS) -> None:
        check_special_tokens(special_tokens)
        _check_characters(characters)
        self._spellings = {name: special_tokens[name] for name in SPECIAL_NAMES if name in special_tokens}
        self._characters = tuple(characters)
        self._character_ids = {c: i for i, c in enumerate(self._characters, start=len(self._spellings))}
        table = [token.encode() for token in (*self._spellings.values(), *self._characters)]
        super().__init__(table, {name: token_id for token_id, name in enumerate(self._spellings)})

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
            check_keys(data, TYPE, VERSION, {"characters"})
            if not isinstance(data["characters"], list):
                raise TokenizerError("characters must be a list")
            return cls(data["characters"], data["special_tokens"])
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}") from None

    def _file(self) -> dict[str, Any]:
        return {
            "type": TYPE,
            "version": VERSION,
            "special_tokens": self._spellings,
            "characters": list(self._characters),
        }

    def _encode_plain(self, text: str, offset: int) -> list[int]:
        table, unknown = self._character_ids, self.unk_id
        if unknown is not None:
            return [table.get(character, unknown) for character in text]
        try:
            return [table[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise UnknownCharacterError(character, offset + text.index(character)) from None


def _check_characters(characters: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for index, character in enumerate(characters):
        if not isinstance(character, str) or len(character) != 1 or not is_utf8(character):
            raise TokenizerError(f"characters[{index}] is {character!r}; it must be one character")
        if character in seen:
            raise TokenizerError(f"characters[{index}] repeats {character!r} of characters[{seen[character]}]")
        seen[character] = index
