"""What is measured: how many streams, how long their prompts and outputs are, and which number counts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Measure = Literal["decode", "throughput", "prefill"]
"""decode: tokens per second after the first; throughput: new tokens per second over the whole time, prompts included;
prefill: prompt tokens per second until the first new one."""


@dataclass(frozen=True)
class Scenario:
    name: str
    measure: Measure
    streams: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, vocab_size: int, round_number: int) -> list[list[int]]:
        """Other random tokens in every round, so that no engine finds a prompt in its cache."""
        draw = random.Random(f"{self.name} {round_number}")
        lowest = min(20, vocab_size // 2)  # leaves special tokens out, wherever they come first
        return [[draw.randrange(lowest, vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.streams)]

    def value(self, answer: Answer) -> float:
        """Tokens per second."""
        match self.measure:
            case "decode":
                return (answer.tokens - self.streams) / (answer.last - answer.first)
            case "throughput":
                return answer.tokens / answer.last
            case "prefill":
                return self.streams * self.prompt_tokens / answer.first


@dataclass(frozen=True)
class Answer:
    """What an engine reports of one run; times are seconds from the moment it was asked."""

    first: float
    """When the first new token was there."""
    last: float
    tokens: int
    ids: tuple[int, ...]
    """How the first output begins."""


LONG_CONTEXT = 2048
SCENARIOS = (
    Scenario("single", "decode", 1, 128, 128),
    Scenario("streams-8", "throughput", 8, 128, 64),
    Scenario("streams-32", "throughput", 32, 128, 64),
    Scenario("prefill-512", "prefill", 1, 512, 1),
    Scenario("prefill-1900", "prefill", 1, 1900, 1),
)
"""Those of a model with a context of LONG_CONTEXT or more."""

SHORT_SCENARIOS = (
    Scenario("single", "decode", 1, 100, 128),
    Scenario("streams-8", "throughput", 8, 100, 64),
    Scenario("streams-32", "throughput", 32, 100, 64),
)
"""Those of a model with a small context."""


def scenarios_for(context_tokens: int) -> tuple[Scenario, ...]:
    return SCENARIOS if context_tokens >= LONG_CONTEXT else SHORT_SCENARIOS
