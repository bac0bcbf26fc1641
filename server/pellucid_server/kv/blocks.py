"""The pool of KV blocks: who holds each, and which are worth keeping after the last holder has gone.

A block holds `block_size` consecutive tokens of one sequence, in every layer of the cache at once. A block table lists
a sequence's blocks in order: token t lives in block table[t // block_size], at place t % block_size.

Every block is in one of three states:

    used    in one or more block tables; `release` takes it out of one of them
    cached  in no table, but published: whoever needs the same content can `share` it. The block that was left longest
            ago is evicted first, when no free one is left
    free    holds nothing of use

A block is published only when it is full, and is never written to while it is published or in more than one table.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from pellucid_server.kv.prefix import BlockContent


class BlockPool:
    """`count` blocks of `block_size` tokens each."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        # A stack: the block freed last is handed out first, while it is still in the processor's cache.
        self._free = list(range(count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """The next to be evicted first."""
        self._references = [0] * count
        self._content: dict[int, BlockContent] = {}
        self._published: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Published blocks that nobody holds."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: the free ones, and the cached ones at the price of their content."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.count - self.available

    @property
    def token_capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.count * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes."""
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        """How many tables the block is in."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks to write to. Raises ValueError where fewer are available; check `available` first."""
        if count > self.available:
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        for _ in range(count - len(self._free)):
            block, _ = self._cached.popitem(last=False)
            self.withdraw(block)
            self._free.append(block)
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Put used or cached blocks into one more table."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int], *, evict_first: bool = False) -> None:
        """Take blocks out of one table, which lists them in this order.

        The last of a table are evicted before those that they follow, without which they are of no use.
        evict_first  nobody is likely to come back for them
        """
        for block in blocks if evict_first else reversed(blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block not in self._content:
                self._free.append(block)
                continue
            self._cached[block] = None
            if evict_first:
                self._cached.move_to_end(block, last=False)

    def publish(self, block: int, content: BlockContent) -> None:
        """Let others find a full block by its content. Of two blocks with the same content, the first is found."""
        if block not in self._content and content.key not in self._published:
            self._content[block] = content
            self._published[content.key] = block

    def withdraw(self, block: int) -> None:
        """Let nobody find the block any more. Those who hold it keep it."""
        content = self._content.pop(block, None)
        if content is not None:
            del self._published[content.key]

    def is_published(self, block: int) -> bool:
        return block in self._content

    def is_own(self, block: int) -> bool:
        """Whether one table holds the block and nobody else can find it."""
        return self._references[block] == 1 and block not in self._content

    def find(self, content: BlockContent) -> int | None:
        """The published block with this content. The tokens themselves are compared too, not only their digest."""
        block = self._published.get(content.key)
        return block if block is not None and self._content[block].tokens == content.tokens else None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless each block is free, cached, or in as many of the tables as it has references."""
        held = Counter(block for table in tables for block in table)
        counted = Counter({block: count for block, count in enumerate(self._references) if count})
        if held != counted:
            raise RuntimeError(f"tables hold blocks {sorted(held.elements())}, counted {sorted(counted.elements())}")
        owned = sorted([*held, *self._free, *self._cached])
        if owned != list(range(self.count)):
            raise RuntimeError(f"{self.count} blocks exist, but used, free and cached ones are {owned}")
        if {content.key: block for block, content in self._content.items()} != self._published:
            raise RuntimeError("published blocks and their contents disagree")
        if not set(self._cached) <= set(self._content) or not set(self._free).isdisjoint(self._content):
            raise RuntimeError("a cached block is not published, or a free one is")
