"""Requests from numbers: request `index` of a run is a function of (options, model, seed, index) alone.

So the same seed gives the same requests in the same order, however many users and processes send them, and a process
that sends every second one needs to hear nothing from the other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pellucid_loadtest.lengths import Lengths, parse_lengths
from pellucid_loadtest.options import CHAT, LONG_INPUT, RANDOM, SHARED_PREFIX, LoadOptions


@dataclass(frozen=True)
class ModelShape:
    """What a workload needs to know of the model."""

    name: str
    context: int
    """Prompt and output together, in tokens."""
    max_output: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One request of a workload.

    clipped   the drawn lengths did not fit the context, or the server's limit on outputs, and were cut
    """

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling_seed: int
    clipped: bool


PROMPT_LENGTHS = {
    RANDOM: "uniform:16:64",
    CHAT: "lognormal:48:0.8",
    SHARED_PREFIX: "uniform:8:32",
    LONG_INPUT: "uniform:1x:3x",
}
OUTPUT_LENGTHS = {
    RANDOM: "uniform:16:64",
    CHAT: "lognormal:64:0.7",
    SHARED_PREFIX: "uniform:16:64",
    LONG_INPUT: "uniform:16:64",
}
"""What --prompt-length and --output-length come to where they are empty. A shared prefix comes on top."""


class Workload:
    """The sequence of requests of a run."""

    def __init__(self, options: LoadOptions, model: ModelShape) -> None:
        self._options = options
        self._model = model
        self._prompt_lengths: Lengths = options.prompt_length or parse_lengths(PROMPT_LENGTHS[options.workload])
        self._output_lengths: Lengths = options.output_length or parse_lengths(OUTPUT_LENGTHS[options.workload])
        ends = set(model.eos_token_ids)
        self._token_ids = [each for each in range(model.vocab_size) if each not in ends] or list(ends)
        self._prefixes: dict[int, tuple[int, ...]] = {}

    def request(self, index: int) -> Request:
        """Request `index`, counted from 0."""
        generator = random.Random(f"{self._options.seed}/request/{index}")
        beginning = self._beginning(generator)
        length = len(beginning) + self._prompt_lengths.draw(generator, self._model.context)
        output = self._output_lengths.draw(generator, self._model.context)
        kept, kept_output = self._fitted(length, output)
        prompt = beginning[:kept] + self._tokens(generator, kept - len(beginning))
        return Request(
            index=index,
            prompt=prompt,
            max_new_tokens=kept_output,
            sampling_seed=generator.getrandbits(32),
            clipped=(kept, kept_output) != (length, output),
        )

    def _fitted(self, length: int, output: int) -> tuple[int, int]:
        """Lengths that the server accepts; those of long-input are meant to pass the context."""
        output = min(output, self._model.max_output)
        if self._options.workload == LONG_INPUT:
            return length, output
        output = max(1, min(output, self._model.context - 1))
        return max(1, min(length, self._model.context - output)), output

    def _beginning(self, generator: random.Random) -> tuple[int, ...]:
        if self._options.workload != SHARED_PREFIX:
            return ()
        return self._prefix(generator.randrange(self._options.prefix_count))

    def _prefix(self, which: int) -> tuple[int, ...]:
        if which not in self._prefixes:
            generator = random.Random(f"{self._options.seed}/prefix/{which}")
            self._prefixes[which] = self._tokens(generator, self._options.prefix_length)
        return self._prefixes[which]

    def _tokens(self, generator: random.Random, count: int) -> tuple[int, ...]:
        return tuple(generator.choices(self._token_ids, k=max(0, count)))
