"""Which tokens can complete a stop string, so that the engine tells of them at once.

The engine knows ids, not text. A text ends in a stop string only with a token that holds the string's last byte; such
tokens are named to it. In: a tokenizer, and stop strings. Out: ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property

from pellucid_model.tokenizers import Tokenizer

MOST_IDS = 4096
"""Beyond so many, naming them costs more than it brings."""
REPLACEMENT = "\ufffd"
"""What bytes become that are no character: the token's own bytes do not tell."""


class StopIds:
    """Of one tokenizer. The first call that has stop strings looks through the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, stop_strings: Sequence[str]) -> list[int] | None:
        """Ids one of which must come for an output to end with one of the strings; None: there are too many to name."""
        if any(stop.endswith(REPLACEMENT) for stop in stop_strings):
            return None
        lasts = {stop.encode()[-1] for stop in stop_strings}
        if sum(len(self._holding[last]) for last in lasts) > MOST_IDS:
            return None
        return sorted({token_id for last in lasts for token_id in self._holding[last]})

    @cached_property
    def _holding(self) -> list[array[int]]:
        """For each byte the ids of tokens that hold it."""
        holding = [array("i") for _ in range(256)]
        for token_id in range(self._tokenizer.vocab_size):
            for byte in set(self._tokenizer.token_bytes(token_id)):
                holding[byte].append(token_id)
        return holding
