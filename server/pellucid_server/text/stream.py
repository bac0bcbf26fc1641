"""The text of one output: detokenizing, then stop strings. The only way from ids to text while generating.

In: the ids that the output is made of, as they come. Out: pieces of text that join to what a reader sees, and the stop
string that ended it. A unary answer is the joined pieces.

An id that ended the output (EOS or a stop token id) adds no text: it is not pushed, only finish() is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pellucid_server.text.detokenizer import IncrementalDetokenizer, Vocabulary
from pellucid_server.text.stop import StopMatcher


class Delta(NamedTuple):
    """Text that tokens let out, perhaps none, and the stop string that one of them completed."""

    text: str
    matched_stop: str | None = None
    token_count: int = 0
    """With a stop string: how many of the tokens it took."""


class TextStream:
    """State of one output.

    stop_strings          none empty; matched in the output's text, special tokens included only if they are kept
    include_stop_in_text  the stop string stays in the text
    keep_special_tokens   special tokens show as their spelling
    min_new_tokens        a stop string counts only if the token that completes it is this one (from 1) or a later one
    """

    def __init__(
        self,
        tokenizer: Vocabulary,
        stop_strings: Sequence[str] = (),
        include_stop_in_text: bool = False,
        keep_special_tokens: bool = False,
        min_new_tokens: int = 0,
    ) -> None:
        self._has_stops = bool(stop_strings)
        self._detokenizer = IncrementalDetokenizer(tokenizer, keep_special_tokens)
        self._matcher = StopMatcher(stop_strings, include_stop_in_text)
        self._min_new_tokens = min_new_tokens
        self._token_count = 0

    def push(self, token_ids: Sequence[int]) -> Delta:
        """The next tokens. After a delta with matched_stop the output is over, and later tokens add nothing."""
        if not self._has_stops:
            return Delta(self._detokenizer.push(token_ids))
        pieces = []
        for count, token_id in enumerate(token_ids, start=1):
            self._token_count += 1
            allowed = self._token_count >= self._min_new_tokens
            text, matched = self._matcher.push(self._detokenizer.push((token_id,)), allowed)
            pieces.append(text)
            if matched is not None:
                return Delta("".join(pieces), matched, count)
        return Delta("".join(pieces))

    def finish(self) -> str:
        """The text still held, at every kind of end. An unfinished character is U+FFFD; no stop string matches."""
        text, _ = self._matcher.push(self._detokenizer.flush(), allowed=False)
        return text + self._matcher.flush()
