"""One sequence's state, and what a step does with it. Data only; no decisions, no torch.

A sequence's state is its tokens and how many of them are computed, that is, have their keys and values in the cache.
Prefill, chunked prefill, decode, recomputation after a preemption and after the move of a re-encoded window are all
"compute the tokens that are not computed yet".

Under a re-encoded window (kv/window.py) the cache holds a *view* of the sequence: its sinks and what follows the
origin, `offset` tokens in between left out. Chunks and positions count in the view. Without such a window the view is
the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pellucid_server.engine.messages import Finished, FinishKind, Progress, Submit, TokenLogprob
from pellucid_server.kv.prefix import PrefixChain

AGEING_SECONDS = 10.0
"""What a level of priority is worth. A request that waits is overtaken only by those that come less than this times
the difference in priority after it, so none waits for ever."""
FREED = -1
"""In a block table: the block has gone back to the pool, and no row looks there any more."""
NONE_SCORED = range(0)
"""See Chunk.scored."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class SequenceState:
    """One sequence from submission to its end."""

    request: Submit
    rank: tuple[float, int]
    """Who comes first, the least above all: the time of arrival, put forward by priority; then the order of arrival."""
    max_length: int
    """The request's, or what the whole pool holds where that is less and no window makes up for it."""
    tokens: list[int]
    """Prompt and output."""
    chain: PrefixChain
    """Contents of the view's full blocks, as far as somebody has asked for them."""
    unscored: int
    """Prompt tokens, at its end, that the rows before them have yet to foretell, for prompt_logprobs."""
    offset: int = 0
    """Tokens left out of the view, behind the sinks."""
    computed: int = 0
    """How many tokens of the view, from the left, have keys and values in the cache."""
    blocks: list[int] = field(default_factory=list)
    """The block table; FREED where a window has passed a block by."""
    freed: int = 0
    """How many blocks of the table are FREED: a run behind those of the sinks."""
    published: int = 0
    """How many blocks of the table, from the left, need not be published any more."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache when the sequence first ran."""
    first_scheduled_at: float | None = None
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Not reported yet."""
    watched: frozenset[int] = frozenset()
    """Of the request's watched_ids."""

    @staticmethod
    def of(request: Submit, rank: tuple[float, int], max_length: int, chain: PrefixChain) -> SequenceState:
        wish = request.prompt_logprobs
        unscored = 0 if wish is None else min(len(request.prompt) - 1, len(request.prompt) - wish.start)
        tokens = [*request.prompt, *request.generated]
        state = SequenceState(
            request, rank, max_length, tokens, chain, max(0, unscored), watched=frozenset(request.watched_ids)
        )
        if wish is not None and wish.start == 0:
            state.prompt_logprobs.append(TokenLogprob(request.prompt[0], None, 0))
        return state

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def scored(self) -> int:
        """How many of the first tokens have told what follows them, or need not."""
        return len(self.request.prompt) - 1 - self.unscored

    def places_to_score(self, start: int, count: int) -> range:
        """Places in the view, of `count` from `start` on, of prompt tokens that have yet to tell what follows them."""
        first, end = self.scored - self.offset, len(self.request.prompt) - 1 - self.offset
        return range(max(start, first), max(start, first, min(start + count, end)))

    @property
    def length(self) -> int:
        """Tokens that the view ends with: all; or, while a prompt is scored, those that the same origin sees."""
        if not self.unscored or self.request.context.kind != "reencode":
            return len(self.tokens)
        return min(len(self.tokens), self.request.context.span + self.request.context.offset(self.scored))

    @property
    def view_length(self) -> int:
        return self.length - self.offset

    @property
    def pending(self) -> int:
        """Tokens of the view still to be computed; they are known already."""
        return (self.length if self.unscored else len(self.tokens)) - self.offset - self.computed

    @property
    def held_blocks(self) -> list[int]:
        return [block for block in self.blocks if block != FREED] if self.freed else self.blocks

    def view(self, start: int, count: int) -> list[int]:
        """Tokens of the view from its place `start` on."""
        offset = self.offset
        if offset == 0:
            return self.tokens[start : start + count]
        sinks = self.request.context.sinks
        if start >= sinks:
            return self.tokens[start + offset : start + offset + count]
        return (self.tokens[:sinks] + self.tokens[sinks + offset :])[start : start + count]

    def banned_ids(self, ahead: int = 0) -> Sequence[int]:
        """Ids that may not be sampled `ahead` tokens from here: end and stop tokens until min_new_tokens are out."""
        if self.output_count + ahead >= self.request.min_new_tokens:
            return ()
        return (*self.request.eos_ids, *self.request.stop_ids)

    def progress(
        self, tokens: list[int], finished: Finished | None = None, logprobs: list[TokenLogprob] | None = None
    ) -> Progress:
        """What to report now; a prompt's log-probabilities go with it once they are complete."""
        due: list[TokenLogprob] = []
        if not self.unscored:
            due, self.prompt_logprobs = self.prompt_logprobs, []
        return Progress(
            key=self.request.key,
            tokens=tokens,
            finished=finished,
            first_scheduled_at=self.first_scheduled_at,
            preemptions=self.preemptions,
            logprobs=logprobs or [],
            prompt_logprobs=due,
            cached_tokens=self.cached_tokens,
        )


class Chunk(msgspec.Struct, frozen=True):
    """`count` tokens of a sequence's view, from its place `start` on, to be computed in one step.

    A struct, as Sampled is: each step makes one for each sequence, and a frozen dataclass takes ten times as long.
    """

    sequence: SequenceState
    start: int
    count: int
    samples: bool
    """The next token is sampled after the last of them."""
    scored: range = NONE_SCORED
    """Places in the view, within the chunk, of prompt tokens whose successors' log-probabilities are wanted."""
    draft: tuple[int, ...] = ()
    """Guesses at what follows, which run behind the chunk's own tokens so that more than one token can come of it."""

    @property
    def rows(self) -> int:
        """Tokens that run: the chunk's own and its draft."""
        return self.count + len(self.draft)

    @property
    def sampled_rows(self) -> int:
        """Rows, at the chunk's end, whose logits are wanted: the last of its own tokens' and its draft's."""
        return 1 + len(self.draft) if self.samples else 0

    @property
    def decodes(self) -> bool:
        """Whether its one token is the one that was sampled last, and the next one is sampled after it."""
        return self.count == 1 and self.samples and len(self.sequence.tokens) > len(self.sequence.request.prompt)

    @property
    def tokens_left(self) -> int:
        """Tokens that may come of it and of what follows, before a limit ends the sequence or its window moves."""
        sequence, request = self.sequence, self.sequence.request
        count = min(len(request.prompt) + request.max_new_tokens, sequence.max_length) - len(sequence.tokens)
        if request.context.kind == "reencode":
            return min(count, request.context.span - self.start - self.count + 1)
        return count

    @property
    def first_target(self) -> int:
        """Which token of the sequence the first of the scored places foretells."""
        return self.scored.start + self.sequence.offset + 1


@dataclass(frozen=True, slots=True)
class Step:
    """What to run together, and sequences that ended before it."""

    chunks: list[Chunk]
    """At most one per sequence."""
    expired: list[Progress]
    copies: list[tuple[int, int]]
    """Blocks to be copied before the chunks run, (from, to), one after the other."""
    decodes: int
    """Chunks that decode."""
    repeats: int
    """How often it may be run, each time with the token that was sampled the time before (multi_step.py)."""

    @property
    def tokens(self) -> int:
        """Rows, drafts included."""
        return sum([chunk.rows for chunk in self.chunks])


class Sampled(msgspec.Struct, frozen=True):
    """What came out of a row that is sampled."""

    token: int | None
    """None: there was none to choose."""
    logprob: TokenLogprob | None = None
    end: FinishKind | None = None
    """How the output ends with this token, or for want of one: "constraint_done", "no_token" or "non_finite"."""
