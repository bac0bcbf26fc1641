"""A tokenizer with one token per byte of UTF-8: it knows every text, and needs no vocabulary.

It owns `tokenizer.json` of the type "pellucid.bytes":

    {"type": "pellucid.bytes", "version": 1, "first_byte": 0, "special_tokens": {"bos": "<bos>", "eos": "<eos>"}}

The byte b has the id first_byte + b. Special tokens, in the order pad, bos, eos, unk, take the ids that are left: those
below first_byte, then those from first_byte + 256 on. So the example has 256 and 257 for its two, and ByT5's layout is
{"pad", "eos", "unk"} with first_byte = 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pellucid_model.tokenizers.base import TokenizerError
from pellucid_model.tokenizers.simple import SPECIAL_NAMES, SimpleTokenizer, check_keys, check_special_tokens

TYPE = "pellucid.bytes"
VERSION = 1


class ByteTokenizer(SimpleTokenizer):
    """See the module. Raises TokenizerError for values that break the rules."""

    def __init__(self, special_tokens: Mapping[str, str] | None = None, first_byte: int = 0) -> None:
        given = special_tokens or {}
        check_special_tokens(given)
        if type(first_byte) is not int or not 0 <= first_byte <= len(given):
            raise TokenizerError(f"first_byte is {first_byte!r}; accepted: 0 to {len(given)}, the special tokens")
        self._spellings = {name: given[name] for name in SPECIAL_NAMES if name in given}
        self._first = first_byte
        spellings = [spelling.encode() for spelling in self._spellings.values()]
        table = [*spellings[:first_byte], *(bytes([byte]) for byte in range(256)), *spellings[first_byte:]]
        places = [*range(first_byte), *range(first_byte + 256, len(table))]
        super().__init__(table, dict(zip(self._spellings, places, strict=True)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "tokenizer.json") -> ByteTokenizer:
        """Read the parsed file. Raises TokenizerError, beginning with `where`."""
        try:
            check_keys(data, TYPE, VERSION, {"first_byte"})
            return cls(data["special_tokens"], data["first_byte"])
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}") from None

    def _file(self) -> dict[str, Any]:
        return {
            "type": TYPE,
            "version": VERSION,
            "first_byte": self._first,
            "special_tokens": self._spellings,
        }

    def _encode_plain(self, text: str, offset: int) -> list[int]:
        return [self._first + byte for byte in text.encode()]
