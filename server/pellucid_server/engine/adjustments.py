"""What a request changes in its logits, kept from step to step in the form that the samplers read.

In: a request's sampling values, then its tokens as they come. Out: arrays. No step costs more than its new tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pellucid_server.engine.messages import Sampling


class TokenHistory:
    """The distinct tokens of a sequence, and how often each one is in its output.

    seen_ids       int32, in the order of their first occurrence, the prompt's first
    output_counts  int32, beside them; 0 for tokens of the prompt alone
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.seen_ids = array("i", dict.fromkeys(prompt))
        self.output_counts = array("i", bytes(self.seen_ids.itemsize * len(self.seen_ids)))
        self._places = {token: place for place, token in enumerate(self.seen_ids)}
        self._length = len(prompt)

    def follow(self, tokens: Sequence[int]) -> None:
        """Count what the sequence, prompt and output, has more than the last time."""
        for token in tokens[self._length :]:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Count one token more."""
        place = self._places.setdefault(token, len(self.seen_ids))
        if place == len(self.seen_ids):
            self.seen_ids.append(token)
            self.output_counts.append(0)
        self.output_counts[place] += 1
        self._length += 1


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Biases, allowed ids and the history that penalties look at; None where there are no penalties."""

    bias_ids: array[int]
    biases: array[float]
    allowed_ids: array[int]
    history: TokenHistory | None

    @classmethod
    def of(cls, sampling: Sampling, prompt: Sequence[int]) -> Self | None:
        """None where the request changes no logits."""
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        history = None if penalties == (1, 0, 0) else TokenHistory(prompt)
        if history is None and not sampling.logit_bias and not sampling.allowed_ids:
            return None
        return cls(
            bias_ids=array("i", (token for token, _ in sampling.logit_bias)),
            biases=array("d", (bias for _, bias in sampling.logit_bias)),
            allowed_ids=array("i", sampling.allowed_ids),
            history=history,
        )

    def follow(self, tokens: Sequence[int]) -> None:
        """Take what the sequence, prompt and output, has more than the last time."""
        if self.history is not None:
            self.history.follow(tokens)

    def accept(self, token: int) -> None:
        """Take one token more."""
        if self.history is not None:
            self.history.accept(token)
