"""A step in the making: what the scheduler has put into it so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from pellucid_server.engine.sequence import Chunk, SequenceState


@dataclass(slots=True)
class StepPlan:
    """Chunks, within a budget of tokens."""

    budget: int
    """Tokens that may still be added."""
    chunks: dict[int, Chunk] = field(default_factory=dict)
    """By the sequence's key."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """See Step.copies."""
    preempted: set[SequenceState] = field(default_factory=set)

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk.sequence.request.key] = chunk
        self.budget -= chunk.count

    def drop(self, sequence: SequenceState) -> None:
        """Take out a sequence that is preempted.

        Copies stay: at worst they fill a block that is written to before it is read.
        """
        chunk = self.chunks.pop(sequence.request.key, None)
        self.budget += chunk.count if chunk else 0
        self.preempted.add(sequence)
