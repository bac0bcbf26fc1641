"""Several steps in a row without a word to Python in between: how many, and what ends them early.

As long as nobody joins and nobody leaves, the next step of a batch that decodes is known before this one has run: the
same sequences, each one token further. In: the chunks of such a step. Out: how often it may be run, and the blocks for
it. The tokens are those of as many single steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from pellucid_server.engine.block_tables import BlockTables
from pellucid_server.engine.connection import EngineConnection
from pellucid_server.engine.sequence import Chunk

MOST_STEPS = 256
"""In a row. By then even steps of the smallest models have taken as long as lies between two messages (`pace.py`)."""
NEXT_STEPS = 16
"""Steps that nearly always run, and may have cached blocks too. In a pool that has been in use for a while everything
is cached, and of many sequences one or the other needs a block every few steps."""


@dataclass(frozen=True)
class Interruption:
    """What ends steps in a row, beside the end of a sequence."""

    until: float
    """Seconds of the monotonic clock. The step that runs at that moment is the last."""
    connection: EngineConnection | None = None
    """Once it can be read, the step that runs is the last. What is posted there goes out meanwhile."""

    @property
    def descriptor(self) -> int:
        """-1: none."""
        return -1 if self.connection is None else self.connection.fileno()

    @property
    def outgoing(self) -> bytes:
        return b"" if self.connection is None else self.connection.posted

    def sent(self, count: int) -> None:
        """So many bytes of what was going out have been written; sends the rest. Raises ConnectionClosed."""
        if self.connection is not None:
            self.connection.sent(count)


def steps_in_a_row(chunks: Sequence[Chunk], tables: BlockTables, most: int) -> int:
    """How many steps, 1 to `most`, need no decision in between; allocates their blocks.

    chunks  all of them decode

    More than one only where nobody is to be told of each token at once.
    """
    if most <= 1 or any(chunk.sequence.request.at_once for chunk in chunks):
        return 1
    most = max(1, min([most, *[chunk.tokens_left for chunk in chunks]]))

    def missing(steps: int) -> int:
        return sum([tables.missing(chunk.sequence, chunk.start + steps) for chunk in chunks])

    def most_within(blocks: int, limit: int) -> int:
        return max(1, bisect_right(range(1, limit + 1), blocks, key=missing))

    # Of blocks that hold nothing of use; what is cached goes for the next steps only, not for those that may not run.
    lacking, pool = missing(most), tables.pool
    if lacking > pool.free:
        most = max(most_within(pool.free, most), most_within(pool.available, min(most, NEXT_STEPS)))
    if lacking > 0:
        for chunk in chunks:
            tables.allocate(chunk.sequence, chunk.start + most)
    return most
