"""Makes short Chinese lines in the manner of headlines and dialogue out of `TOPICS`, `FACTS` and `WORDS`.

In: how many lines, and a seed. Out: that many distinct lines in a shuffled order. Only integers are calculated with,
so the same seed gives the same lines on every platform and Python version.
"""

from __future__ import annotations

import re

from pellucid_model.training.corpus.templates import ANSWER_OPENINGS, FACTS, QUESTION_OPENINGS, TOPICS
from pellucid_model.training.corpus.words import WORDS
from pellucid_model.training.errors import TrainingError

DEFAULT_LINES = 120_000
DEFAULT_SEED = 20_240_601
MAX_LINES = 170_000
"""Above this many the smaller topics run out of new lines."""

_MASK = (1 << 64) - 1
_SLOT = re.compile(r"\{(\w+)(!?)\}")
_DRAWS_FOR_A_NEW_WORD = 6
_TRIES_PER_LINE = 40


class SplitMix64:
    """A small generator of 64-bit numbers (Steele, Lea and Flood 2014)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def below(self, bound: int) -> int:
        """A number in [0, bound)."""
        return (self.next() * bound) >> 64

    def shuffle(self, items: list[str]) -> None:
        """Fisher-Yates, in place."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


def generate_lines(count: int = DEFAULT_LINES, seed: int = DEFAULT_SEED) -> list[str]:
    """`count` distinct lines, the topics mixed in proportion to their weights.

    Raises TrainingError where the templates cannot give that many.
    """
    facts = _fact_lines()
    if not len(facts) < count <= MAX_LINES:
        raise TrainingError(f"corpus lines = {count}: must be between {len(facts) + 1} and {MAX_LINES}")
    random = SplitMix64(seed)
    lines = dict.fromkeys(facts)  # in order of arrival, with quick look-up
    for templates, quota in _quotas(count - len(facts)):
        _add_lines(lines, templates, quota, random)
    shuffled = list(lines)
    random.shuffle(shuffled)
    return shuffled


def _fact_lines() -> list[str]:
    """Every fact in every way of asking and answering."""
    lines = []
    for fact in FACTS.split():
        question, answer = fact.split("|")
        lines += [f"{ask}{question}{say}{answer}" for ask in QUESTION_OPENINGS for say in ANSWER_OPENINGS]
    return lines


def _quotas(count: int) -> list[tuple[list[str], int]]:
    """Templates of each topic, and how many lines to make of them; the last topic takes what rounding leaves."""
    total = sum(topic.weight for topic in TOPICS)
    shares = [count * topic.weight // total for topic in TOPICS]
    shares[-1] += count - sum(shares)
    return [(_templates(topic.templates), share) for topic, share in zip(TOPICS, shares, strict=True)]


def _templates(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _add_lines(lines: dict[str, None], templates: list[str], quota: int, random: SplitMix64) -> None:
    target = len(lines) + quota
    for _ in range(quota * _TRIES_PER_LINE):
        if len(lines) == target:
            return
        lines.setdefault(_fill(templates[random.below(len(templates))], random))
    if len(lines) < target:
        raise TrainingError(f"the templates beginning with {templates[0]!r} cannot give {quota} distinct lines")


def _fill(template: str, random: SplitMix64) -> str:
    chosen: dict[str, list[str]] = {}

    def word(slot: re.Match[str]) -> str:
        name, repeat = slot.groups()
        earlier = chosen.setdefault(name, [])
        if repeat:
            return earlier[0]
        choices = _CHOICES[name]
        for _ in range(_DRAWS_FOR_A_NEW_WORD):
            drawn = choices[random.below(len(choices))]
            if drawn not in earlier:
                break
        earlier.append(drawn)
        return drawn

    return _SLOT.sub(word, template)


def _weighted(text: str) -> list[str]:
    """'a b*2' -> ['a', 'b', 'b']."""
    words: list[str] = []
    for entry in text.split():
        word, _, weight = entry.partition("*")
        words += [word] * int(weight or 1)
    return words


_CHOICES = {name: _weighted(text) for name, text in WORDS.items()}
