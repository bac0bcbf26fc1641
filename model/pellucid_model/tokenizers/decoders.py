"""What one token of a `tokenizer.json` adds to a text, read from the file's "decoder" section.

In: that section. Out: a rule that turns a token's spelling in the vocabulary into bytes. Only decoders that treat
every token by itself can be streamed, so those are served and the others are refused by name:

    ByteLevel                      each character of the spelling stands for one byte (GPT-2's table)
    Metaspace, Replace, Fuse,      SentencePiece: "▁" stands for a space, "<0xE4>" for a byte, and the space
    ByteFallback, Strip            before the first word is not part of the text
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pellucid_model.tokenizers.base import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenRule:
    """How a vocabulary entry becomes bytes.

    byte_level     the spelling is written in GPT-2's table
    replacements   (old, new) pairs, in order
    byte_fallback  entries like <0xE4> are single bytes
    strip          (character, count): a whole text loses up to that many of that character at its beginning
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = ("", 0)

    def vocabulary_bytes(self, token: str) -> bytes:
        """Bytes of an entry of the model's vocabulary."""
        if self.byte_level and all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match.group(1))
        return self.added_bytes(token)

    def added_bytes(self, content: str) -> bytes:
        """Bytes of a token that was added to the vocabulary: its content, never read through GPT-2's table."""
        for old, new in self.replacements:
            content = content.replace(old, new)
        return content.encode()

    def strip_beginning(self, text: str) -> str:
        """A whole text without the space that SentencePiece put before it."""
        character, count = self.strip
        for _ in range(count):
            text = text.removeprefix(character)
        return text


def read_rule(decoder: Mapping[str, Any] | None) -> TokenRule:
    """The rule for a "decoder" section. Raises TokenizerError, naming a decoder that cannot be streamed."""
    if decoder is None:
        raise TokenizerError("decoder is null, which joins tokens with spaces; ByteLevel or SentencePiece is needed")
    byte_level = byte_fallback = False
    replacements: list[tuple[str, str]] = []
    strip = ("", 0)
    fused = False
    for step in _flatten(decoder):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old and not fused:
                replacements.append((old, new))
            case {"type": "Strip", "content": str(character), "start": int(count), "stop": 0} if fused:
                strip = (character, count)
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                if step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True):
                    strip = (" ", 1)
            case _:
                raise TokenizerError(f"decoder {_describe(step)} cannot be decoded token by token")
    return TokenRule(byte_level, tuple(replacements), byte_fallback, strip)


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [inner for step in decoder.get("decoders", []) for inner in _flatten(step)]


def _describe(step: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key}={value!r}" for key, value in step.items() if key != "type")
    return f"{step.get('type')}({settings})"


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable character for each byte: Latin-1's own where it prints, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return table


_BYTE_OF_CHARACTER = _byte_level_table()
