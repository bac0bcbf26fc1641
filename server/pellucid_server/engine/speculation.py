"""Drafts: guesses at a sequence's next tokens, read off its own past, for one step to bring more than one token.

In: the chunks of a step that is planned, and the room it has left. Out: the same chunks, some with a draft. A draft
never changes a token: the step samples behind each of its tokens as it would have a step later, and what is sampled is
what counts. So all that is decided here is speed.

A sequence that comes by the same few tokens once more is likely to go on as it did then: code, quotes, summaries
(prompt lookup decoding; Saxena 2023). The draft is what followed the longest of the latest matches. It takes nothing
from anybody, neither a block that holds anything of use nor the budget of another sequence, and it ends where a limit
would end the output or a window would move.

How long a draft is worth its rows follows from how often guesses after matches of this length have been right so far in
the sequence, and from the rows of the step: the fewer there are, the less does one more cost in comparison. All that is
kept of a sequence follows from its tokens and is made anew in another engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from pellucid_server.engine.block_tables import BlockTables
from pellucid_server.engine.sequence import Chunk, SequenceState

SHORTEST_MATCH, LONGEST_MATCH = 2, 8
"""Tokens that a guess goes by; longer matches count as the longest."""
CANDIDATES = 4
"""Earlier places that are looked at for a guess, the latest first."""
MOST_DRAFTED = 64
"""Drafted tokens in a step: each needs a row of logits, for which nobody has set memory aside."""
ROWS_OF_A_STEP = 8
"""A step without rows would take about as long as so many rows add to it (docs/speculative-decoding.md)."""
FIRST_TRUST = (0.3, 0.45, 0.6, 0.7, 0.75, 0.8, 0.85)
"""How likely a guess is right before any has been seen, by the length of the match from the shortest on."""
LEARNING_RATE = 0.1


@dataclass(frozen=True, slots=True)
class Match:
    """A place in the past that ends as the sequence does now."""

    length: int
    begin: int
    """Where what followed it begins."""

    def continuation(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens that follow `tokens` if all goes on as it did there, round and round where that is the end."""
        period = len(tokens) - self.begin
        return tuple(tokens[self.begin + ahead % period] for ahead in range(count))


class NgramIndex:
    """Where a sequence's last two tokens have been side by side before. A token costs one look-up."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        """By pair of tokens: where the second of them was, the last time."""
        self._previous = array("i", [-1])
        """By place: where the pair that ends there ended the time before; -1: never."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Take what the sequence has more than the last time."""
        for place in range(len(self._previous), len(tokens)):
            pair = tokens[place - 1] << 32 | tokens[place]
            self._previous.append(self._last.get(pair, -1))
            self._last[pair] = place

    def match(self, tokens: Sequence[int]) -> Match | None:
        """The longest of the latest matches of the tokens that `follow` was shown last."""
        end = len(tokens) - 1
        best, place = None, self._previous[end]
        for _ in range(CANDIDATES):
            if place < 0 or (best is not None and best.length == LONGEST_MATCH):
                break
            length = _common_suffix(tokens, place, end)
            if best is None or length > best.length:
                best = Match(length, place + 1)
            place = self._previous[place]
        return best


def _common_suffix(tokens: Sequence[int], place: int, end: int) -> int:
    """How many tokens up to `place` are the same as those up to `end`, at most LONGEST_MATCH; two are."""
    length = SHORTEST_MATCH
    while length < min(LONGEST_MATCH, place + 1) and tokens[place - length] == tokens[end - length]:
        length += 1
    return length


@dataclass(slots=True)
class _Memory:
    """What is kept of a sequence."""

    index: NgramIndex = field(default_factory=NgramIndex)
    trust: list[float] = field(default_factory=lambda: list(FIRST_TRUST))
    """By the match's length, from SHORTEST_MATCH on: how likely the next token of a guess is right."""
    guess: tuple[int, ...] = ()
    """The last one, whether it became a draft or not."""
    guess_begin: int = 0
    guess_match: int = SHORTEST_MATCH

    def learn(self, tokens: Sequence[int]) -> None:
        """See how the last guess has fared, up to where it was wrong, and take the new tokens in."""
        trust, place = self.trust, self.guess_match - SHORTEST_MATCH
        for guessed, token in zip(self.guess, tokens[self.guess_begin :], strict=False):
            trust[place] += LEARNING_RATE * ((guessed == token) - trust[place])
            if guessed != token:
                break
        self.guess = ()
        self.index.follow(tokens)

    def draft(self, tokens: Sequence[int], most: int, price: float) -> tuple[int, ...]:
        """Tokens that are right with a chance of at least `price`, at most `most`."""
        self.learn(tokens)
        match = self.index.match(tokens)
        if match is None:
            return ()
        chance = trust = self.trust[match.length - SHORTEST_MATCH]
        count = 0
        while count < most and chance >= price:
            count += 1
            chance *= trust
        self.guess = match.continuation(tokens, max(1, count))
        self.guess_begin, self.guess_match = len(tokens), match.length
        return self.guess[:count]


class Speculation:
    """Gives drafts of at most `most` tokens to the sequences of one engine; 0: none."""

    def __init__(self, most: int) -> None:
        self.drafted = 0
        """Tokens, since the engine's start."""
        self.accepted = 0
        """Those of them that were sampled indeed."""
        self._most = most
        self._memories: WeakKeyDictionary[SequenceState, _Memory] = WeakKeyDictionary()

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def extend(self, chunks: Collection[Chunk], budget: int, tables: BlockTables) -> list[Chunk]:
        """Give drafts to the chunks that sample, of at most `budget` tokens in all, and allocate their blocks."""
        if not self.is_on:
            return list(chunks)
        budget = min(budget, MOST_DRAFTED)
        rows = sum(chunk.count for chunk in chunks)
        price = rows / (rows + ROWS_OF_A_STEP)
        extended = []
        for chunk in chunks:
            draft = self._draft(chunk, budget, price, tables) if chunk.samples and not chunk.scored else ()
            budget -= len(draft)
            extended.append(replace(chunk, draft=draft) if draft else chunk)
        return extended

    def judge(self, chunk: Chunk, accepted: int) -> None:
        """Count a draft, and how many of its tokens were right."""
        self.drafted += len(chunk.draft)
        self.accepted += accepted

    def _draft(self, chunk: Chunk, budget: int, price: float, tables: BlockTables) -> tuple[int, ...]:
        sequence, length = chunk.sequence, chunk.start + chunk.count
        most = min(self._most, budget, chunk.tokens_left - 1, tables.spare(sequence, length))
        if most <= 0:
            return ()
        memory = self._memories.get(sequence)
        if memory is None:
            memory = self._memories[sequence] = _Memory()
        draft = _until_end(sequence, memory.draft(sequence.tokens, most, price))
        tables.allocate(sequence, length + len(draft))
        return draft


def _until_end(sequence: SequenceState, draft: tuple[int, ...]) -> tuple[int, ...]:
    """The draft up to the first token that would end the sequence."""
    ends = (*sequence.request.eos_ids, *sequence.request.stop_ids)
    return next((draft[:place] for place, token in enumerate(draft) if token in ends), draft)
