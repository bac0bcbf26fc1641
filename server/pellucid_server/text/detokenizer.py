"""Token ids to whole characters, as the ids come.

In: the ids of an output in their order. Out: text. A character that is cut into several tokens comes out with the
token that completes it; at most three bytes wait. Bytes that can no longer become a character come out at once as
U+FFFD, exactly as bytes.decode("utf-8", "replace") writes them, so the pieces join to the decoded whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """What is needed of a tokenizer (pellucid_model.tokenizers.Tokenizer) to make text of its ids."""

    @property
    def special_ids(self) -> frozenset[int]:
        """See Tokenizer.special_ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer.token_bytes."""
        ...


class IncrementalDetokenizer:
    """The text of one output. Special tokens are left out unless keep_special_tokens asks for their spelling."""

    def __init__(self, tokenizer: Vocabulary, keep_special_tokens: bool = False) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._dropped_ids: frozenset[int] = frozenset() if keep_special_tokens else tokenizer.special_ids
        self._held = b""
        """The beginning of a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete, perhaps none."""
        dropped, token_bytes = self._dropped_ids, self._token_bytes
        data = self._held + b"".join([token_bytes(each) for each in token_ids if each not in dropped])
        text, length = codecs.utf_8_decode(data, "replace", False)
        self._held = data[length:]
        # These can only become a surrogate, which is no character. Python's decoder would wait.
        if len(self._held) == 2 and self._held[0] == 0xED and self._held[1] >= 0xA0:
            return text + self.flush()
        return text

    def flush(self) -> str:
        """What an unfinished character becomes at the end: U+FFFD, or nothing."""
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")
