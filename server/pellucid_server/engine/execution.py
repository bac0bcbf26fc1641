"""A step, from its chunks to tokens: the model runs, and for each row that is due a token is sampled and looked up.

In: a Step. Out: what was sampled, and log-probabilities of prompt tokens. Between two steps nothing is kept here; what
a sequence has come to is its own state.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from pellucid_server.engine.choosing import Chooser
from pellucid_server.engine.messages import TokenLogprob
from pellucid_server.engine.multi_step import Interruption
from pellucid_server.engine.runner import ModelRunner
from pellucid_server.engine.sequence import Chunk, Sampled, SequenceState, Step

PromptLogprobs = dict[int, list[TokenLogprob] | None]
"""By the sequence's key, in the order of its tokens; None where a row was not finite."""


@dataclass(frozen=True)
class Outcome:
    """What a step brought, run once or several times."""

    sampled: list[list[Sampled]]
    """Of each chunk that samples."""
    scores: PromptLogprobs
    """Of the prompt tokens that are scored."""
    ended: list[float]
    """When each time had sampled, in seconds of the monotonic clock."""


@dataclass(frozen=True)
class Executor:
    """Runs steps."""

    runner: ModelRunner
    chooser: Chooser

    def execute(self, step: Step, interruption: Interruption | None = None) -> Outcome:
        """Run a step, and again, up to `step.repeats` times in all, until the interruption.

        Raises ConnectionClosed where the interruption's connection is.
        """
        if not step.chunks:
            return Outcome([], {}, [time.monotonic()])
        scores: PromptLogprobs = {}

        def score(chunk: Chunk, first: int, logits: Tensor) -> None:
            key = chunk.sequence.request.key
            so_far, read = scores.get(key, []), self._foretold(chunk.sequence, first, logits)
            scores[key] = None if so_far is None or read is None else so_far + read

        due = [chunk for chunk in step.chunks if chunk.samples]
        self.chooser.begin(due)
        if interruption is not None and step.repeats > 1:
            sampling = self.chooser.repeatable(step.repeats, interruption)
            if sampling is not None:
                ran = self.runner.run_steps(step, sampling)
                interruption.sent(ran.written)
                return Outcome(self.chooser.chosen(ran.sampled, ran.logits), {}, ran.ended.tolist())
        if interruption is not None:
            interruption.sent(0)
        logits = self.runner.run(step, score)
        sampled = self.chooser.choose(due, logits) if due else []
        return Outcome(sampled, scores, [time.monotonic()])

    def _foretold(self, sequence: SequenceState, first: int, logits: Tensor) -> list[TokenLogprob] | None:
        """Log-probabilities of the tokens from `first` on by `logits` [rows, V]; None where a row is not finite."""
        wish = sequence.request.prompt_logprobs
        if wish is None:
            return []
        tokens = sequence.tokens[first : first + len(logits)]
        read = self.chooser.logprobs.read(logits, tokens, [wish] * len(tokens))
        finite = [entry for entry in read if entry is not None]
        return finite if len(finite) == len(read) else None
