"""The pool of KV blocks: which are free, and nothing else.

A block holds `block_size` consecutive tokens of one sequence, in every layer of the cache at once. A block table lists
a sequence's blocks in order: token t lives in block table[t // block_size], at place t % block_size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """`count` blocks of `block_size` tokens each."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        # A stack: the block freed last is handed out first, while it is still in the processor's cache.
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def token_capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.count * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises ValueError where fewer are free; check `free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        self._free.extend(reversed(blocks))

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless every block is either free or in exactly one of the tables."""
        owned = [block for table in tables for block in table] + self._free
        if sorted(owned) != list(range(self.count)):
            raise RuntimeError(f"{self.count} blocks exist, but free and held ones are {sorted(owned)}")
