"""Which blocks each sequence holds: what it finds when it starts, what it adds, shares, copies, publishes and gives up.

Owns the block tables. Comes in: a sequence and what the scheduler wants of it. Goes out: its table changed, and blocks
to be copied before the next forward. Pure Python.

A sequence starts from what is there already: the blocks of another sequence of its group, or published ones. Both are
shared, never written to: a sequence that is about to write into a block that others hold or may find copies it first
(copy-on-write). At least the last token of a sequence is always computed, because its logits are needed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from pellucid_server.engine.messages import Submit
from pellucid_server.engine.sequence import FREED, SequenceState
from pellucid_server.kv.blocks import BlockPool
from pellucid_server.kv.prefix import PrefixChain, longest_start


@dataclass(frozen=True, slots=True)
class Start:
    """Blocks with which a sequence can begin: a table for its first `computed` tokens."""

    computed: int
    blocks: list[int]
    """FREED where no row from there on looks."""
    freed: int
    from_cache: bool
    """Found by content, not taken from a member of the group."""

    @property
    def held(self) -> list[int]:
        return _held(self.blocks)


class BlockTables:
    """Block tables over one pool.

    native_window  the widest window of a model all of whose layers have one, so that older blocks can go; else 0
    widest_window  the widest one that any layer has; else 0
    prefix_cache   whether blocks are published and looked up at all
    """

    def __init__(
        self, pool: BlockPool, native_window: int = 0, widest_window: int = 0, *, prefix_cache: bool = True
    ) -> None:
        self.pool = pool
        self.native_window = native_window
        self._widest_window = widest_window
        self.queried_tokens = 0
        """Prompt tokens that were looked up when their sequence first ran."""
        self.hit_tokens = 0
        """Those of them that were found."""
        self._prefix_cache = prefix_cache
        self._namespace = secrets.token_bytes(32)

    def new_chain(self, request: Submit) -> PrefixChain:
        return PrefixChain(
            self._namespace,
            request.cache_salt,
            self.pool.block_size,
            request.context,
            self.native_window,
            self._widest_window,
        )

    def blocks_needed(self, request: Submit, length: int) -> int:
        """Blocks with which a sequence of `length` tokens can always go on."""
        return request.context.blocks_needed(length, self.pool.block_size, self.native_window)

    def find_start(self, sequence: SequenceState, siblings: Iterable[SequenceState] = ()) -> Start:
        """The longest start there is for a sequence without blocks. Changes nothing."""
        starts = [self._shared_start(sequence, sibling) for sibling in siblings]
        starts.append(self._cached_start(sequence))
        return max(starts, key=lambda start: start.computed)

    def fits(self, sequence: SequenceState, start: Start) -> bool:
        """Whether there are blocks for all that the sequence has to compute if it begins so."""
        return self.missing_blocks(sequence, start) <= self.pool.available

    def missing_blocks(self, sequence: SequenceState, start: Start) -> int:
        """Blocks that must be available for the sequence to begin so and compute all it has to."""
        held = start.held
        idle = sum(self.pool.references(block) == 0 for block in held)
        copied = start.computed % self.pool.block_size > 0 and self.pool.references(start.blocks[-1]) > 0
        return idle + copied + max(0, self.blocks_needed(sequence.request, len(sequence.tokens)) - len(held))

    def begin(self, sequence: SequenceState, start: Start) -> None:
        """Let a sequence without blocks begin so."""
        self.pool.share(start.held)
        sequence.blocks, sequence.freed, sequence.computed = start.blocks, start.freed, start.computed
        sequence.published = start.computed // self.pool.block_size
        if sequence.first_scheduled_at is None and sequence.request.cache_read and self._prefix_cache:
            # Of a sequence carried over from another engine the window may have passed all of the prompt but its sinks.
            prompt = len(sequence.request.prompt)
            prompt = max(min(prompt, sequence.request.context.sinks), prompt - sequence.offset)
            sequence.cached_tokens = min(start.computed, prompt) if start.from_cache else 0
            self.queried_tokens += prompt
            self.hit_tokens += sequence.cached_tokens

    def has_place(self, sequence: SequenceState) -> bool:
        """Whether the next token goes into a block that is the sequence's own: the rule where it decodes."""
        index = sequence.computed // self.pool.block_size
        return index < len(sequence.blocks) and self.pool.is_own(sequence.blocks[index])

    def room(self, sequence: SequenceState) -> int:
        """Tokens that the sequence can compute in the blocks it holds and those that are available."""
        blocks = len(sequence.blocks) + self.pool.available
        if self._next_is_shared(sequence):
            blocks = blocks - 1 if self.pool.available else 0
        return blocks * self.pool.block_size - sequence.computed

    def grow(self, sequence: SequenceState, count: int) -> list[tuple[int, int]]:
        """Make the next `count` tokens' blocks the sequence's own to write to -> blocks to be copied, (from, to)."""
        index, copies = sequence.computed // self.pool.block_size, []
        if index < len(sequence.blocks) and not self.pool.is_own(block := sequence.blocks[index]):
            if self.pool.available:
                (sequence.blocks[index],) = self.pool.allocate(1)
                copies.append((block, sequence.blocks[index]))
                self.pool.release([block])
            else:  # nobody else holds it, or there would be no room
                self.pool.withdraw(block)
        self.allocate(sequence, sequence.computed + count)
        return copies

    def allocate(self, sequence: SequenceState, length: int) -> None:
        """Let the table reach up to `length` tokens of the view."""
        if missing := self.missing(sequence, length):
            sequence.blocks += self.pool.allocate(missing)

    def missing(self, sequence: SequenceState, length: int) -> int:
        """Blocks that the table lacks to reach up to `length` tokens of the view."""
        return max(0, self.pool.blocks_for(length) - len(sequence.blocks))

    def spare(self, sequence: SequenceState, length: int) -> int:
        """Tokens for which there is room behind `length` that have been planned, at nobody's cost."""
        return (len(sequence.blocks) + self.pool.free) * self.pool.block_size - length

    def trim(self, sequence: SequenceState) -> None:
        """Give back the blocks in which nothing is computed."""
        count = self.pool.blocks_for(sequence.computed)
        if len(sequence.blocks) > count:
            self.pool.release(sequence.blocks[count:])
            del sequence.blocks[count:]

    def publish(self, sequence: SequenceState) -> None:
        """Publish the blocks that have become full; only after the step that wrote them."""
        full = sequence.computed // self.pool.block_size
        if sequence.published >= full:
            return
        if self._prefix_cache and sequence.request.cache_write:
            self._extend_chain(sequence, full)
            for index in range(sequence.published, full):
                if sequence.blocks[index] != FREED:
                    self.pool.publish(sequence.blocks[index], sequence.chain[index])
        sequence.published = full

    def withdraw(self, sequence: SequenceState) -> None:
        """Let nobody find the sequence's blocks any more: what is in them is not fit for use."""
        for block in sequence.held_blocks:
            self.pool.withdraw(block)

    def release(self, sequence: SequenceState) -> None:
        """Give up all blocks; nothing is computed any more."""
        self.pool.release(sequence.held_blocks)
        sequence.blocks = []
        sequence.freed = sequence.computed = sequence.published = 0

    def move_window(self, sequence: SequenceState) -> None:
        """Let the window follow the sequence's last token: move a re-encoded view, or free what has rolled out."""
        context = sequence.request.context
        if not self.native_window and (context.kind == "full" or len(sequence.tokens) <= context.window):
            return
        offset = context.offset(sequence.length - 1)
        if offset != sequence.offset:
            self._move_view(sequence, offset)
        passed = self._passed(sequence, sequence.computed)
        if len(passed) > sequence.freed:
            newly = slice(passed.start + sequence.freed, passed.stop)
            count = newly.stop - newly.start
            # What a rolling window leaves behind, beyond the part that is shared with everybody, nobody looks for.
            rolled = newly.start * self.pool.block_size >= context.span > 0
            self.pool.release(sequence.blocks[newly], evict_first=rolled)
            sequence.blocks[newly] = [FREED] * count
            sequence.freed += count

    def _move_view(self, sequence: SequenceState, offset: int) -> None:
        """Begin again with the view behind a new origin.

        The sinks keep their positions and see only each other, so whole blocks of sinks stay as they are.
        """
        size, runs = self.pool.block_size, bool(sequence.blocks)
        kept = 0 if sequence.freed else min(sequence.computed, sequence.request.context.sinks) // size
        self.pool.release(_held(sequence.blocks[kept:]), evict_first=sequence.offset > 0)
        del sequence.blocks[kept:]
        sequence.freed = 0
        sequence.computed = kept * size
        sequence.published = min(sequence.published, kept)
        sequence.offset = offset
        sequence.chain.cut(sequence.request.context.sinks // size)
        if runs and (start := self._cached_start(sequence)).computed > sequence.computed:
            self.pool.share(start.held)
            self.pool.release(sequence.blocks)
            sequence.blocks, sequence.freed, sequence.computed = start.blocks, start.freed, start.computed
            sequence.published = start.computed // size

    def _cached_start(self, sequence: SequenceState) -> Start:
        limit = self._reusable(sequence)
        if not (self._prefix_cache and sequence.request.cache_read) or limit == 0:
            return Start(0, [], 0, True)
        size = self.pool.block_size
        count = min(sequence.view_length // size, self.pool.blocks_for(limit))
        self._extend_chain(sequence, count)
        found = [self.pool.find(sequence.chain[index]) for index in range(count)]
        count = longest_start(found, lambda blocks: self._passed(sequence, min(blocks * size, limit)))
        computed = min(count * size, limit)
        passed = self._passed(sequence, computed)
        blocks = [FREED if index in passed or block is None else block for index, block in enumerate(found[:count])]
        return Start(computed, blocks, len(passed), True)

    def _shared_start(self, sequence: SequenceState, sibling: SequenceState) -> Start:
        """What a running sequence of the same prompt has computed of it."""
        prompt = len(sequence.request.prompt) - sequence.offset
        computed = max(0, min(self._reusable(sequence), prompt, sibling.computed))
        count, passed = self.pool.blocks_for(computed), self._passed(sequence, computed)
        blocks = [FREED if index in passed else block for index, block in enumerate(sibling.blocks[:count])]
        if sequence.offset != sibling.offset or blocks.count(FREED) > len(passed):
            return Start(0, [], 0, False)
        return Start(computed, blocks, len(passed), False)

    def _reusable(self, sequence: SequenceState) -> int:
        """Tokens of the view that need not be computed: not the last, nor those that are yet to be scored."""
        limit = sequence.view_length - 1
        return min(limit, sequence.scored - sequence.offset) if sequence.unscored else limit

    def _passed(self, sequence: SequenceState, computed: int) -> range:
        """Blocks of the table that no row from place `computed` on looks at."""
        context = sequence.request.context
        if context.kind != "roll" and not self.native_window:
            return range(0)
        kept_from, sinks = context.first_kept(computed), context.sinks
        if self.native_window:
            kept_from, sinks = max(kept_from, computed - self.native_window + 1), 0
        begin, end = self.pool.blocks_for(sinks), kept_from // self.pool.block_size
        return range(begin, end) if begin < end else range(0)

    def _next_is_shared(self, sequence: SequenceState) -> bool:
        """Whether the block that the next token would be written to is somebody else's too."""
        index = sequence.computed // self.pool.block_size
        return index < len(sequence.blocks) and self.pool.references(sequence.blocks[index]) > 1

    def _extend_chain(self, sequence: SequenceState, count: int) -> None:
        size = self.pool.block_size
        for index in range(len(sequence.chain), count):
            sequence.chain.append(sequence.view(index * size, size))


def _held(table: list[int]) -> list[int]:
    return [block for block in table if block != FREED]
