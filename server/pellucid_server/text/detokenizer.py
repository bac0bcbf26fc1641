"""Token ids to whole characters, one token at a time.

In: the ids of an output in their order. Out: text. A character that is cut into several tokens comes out with the
token that completes it; at most three bytes wait. Bytes that can no longer become a character come out at once as
U+FFFD, exactly as bytes.decode("utf-8", "replace") writes them, so the pieces join to the decoded whole.
"""

from __future__ import annotations

import codecs
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
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, perhaps none."""
        if token_id in self._dropped_ids:
            return ""
        text = self._decoder.decode(self._token_bytes(token_id))
        return text + self.flush() if self._waits_for_a_surrogate() else text

    def flush(self) -> str:
        """What an unfinished character becomes at the end: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)

    def _waits_for_a_surrogate(self) -> bool:
        """Whether the bytes held can only become a surrogate, which is no character. Python's decoder would wait."""
        held, _ = self._decoder.getstate()
        return len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0
