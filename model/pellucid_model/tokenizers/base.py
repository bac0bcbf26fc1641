"""What every tokenizer offers, and the errors it may raise.

In: text, or token ids. Out: token ids, or the bytes and the text they stand for. Nothing here depends on torch or
numpy, because the server's frontend uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class TokenizerError(ValueError):
    """A tokenizer's files cannot be used; the message says which part of which file and why."""


class InvalidTextError(ValueError):
    """The text holds a lone surrogate, which no UTF-8 can spell."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__(f"text holds a lone surrogate U+{ord(text[offset]):04X} at character {offset}")
        self.offset = offset


class UnknownCharacterError(ValueError):
    """A character that the table does not have, where the table has no <unk> either."""

    def __init__(self, character: str, offset: int) -> None:
        super().__init__(
            f"text holds {character!r} (U+{ord(character):04X}) at character {offset}: not in the tokenizer"
        )
        self.character = character
        self.offset = offset


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Begin-of-sequence token. Having one does not mean that encode() adds it; that is the tokenizer's own rule."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, as far as the tokenizer's files tell."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens. They are dropped from text that a reader sees."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Their ids by the spellings under which `encode` reads them."""
        ...

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of tokenizer.json."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> list[int]:
        """Token ids of a text.

        add_special_tokens    add BOS and the like by the tokenizer's own rule; a BOS that the text already begins
                              with is not doubled
        parse_special_tokens  a special token spelled in the text becomes that token; otherwise it is plain text

        Raises InvalidTextError and UnknownCharacterError.
        """
        ...

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Token ids of one text in pieces, each with whether special tokens spelled in it become those tokens.

        Where a piece ends makes no other difference; a spelling that two pieces make together is plain text. Nothing is
        added. Raises as `encode` does.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text before it; a special token gives its spelling, an unknown id b""."""
        ...

    def decode(self, ids: Iterable[int], *, keep_special_tokens: bool = False) -> str:
        """Text of a whole sequence. Bytes that are not UTF-8 become U+FFFD, as in bytes.decode("utf-8", "replace").

        It differs from a stream of token_bytes in one thing: SentencePiece puts a space of its own before the first
        word, and here that space is removed.
        """
        ...


def join_bytes(tokenizer: Tokenizer, ids: Iterable[int], keep_special_tokens: bool) -> bytes:
    """The bytes of a sequence, with or without its special tokens."""
    special = tokenizer.special_ids
    return b"".join(tokenizer.token_bytes(i) for i in ids if keep_special_tokens or i not in special)


def check_text(text: str) -> None:
    """Raise InvalidTextError where the text cannot be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidTextError(text, error.start) from None
