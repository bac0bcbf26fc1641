"""A step's tokens laid end to end, with all that says where they stand and what they see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pellucid_server.engine.sequence import Step
from pellucid_server.kv.window import FULL


@dataclass(frozen=True)
class RollingWindows:
    """Windows and sinks of a batch in which some sequence rolls."""

    window: Tensor
    """[S] int32; 0: the sequence does not roll."""
    sinks: Tensor
    """[S] int32."""
    sink_query_positions: Tensor
    """[T] int32: where a row stands when it looks at sinks that its window has left behind."""

    @staticmethod
    def of(step: Step, device: torch.device) -> RollingWindows | None:
        contexts = [chunk.sequence.request.context for chunk in step.chunks]
        if all(context.kind != "roll" for context in contexts):
            return None
        rolls = [context if context.kind == "roll" else FULL for context in contexts]
        stand: list[int] = []
        for chunk, context in zip(step.chunks, rolls, strict=True):
            rows = range(chunk.start, chunk.start + chunk.count)
            stand += [min(t, context.span - 1) for t in rows] if context.kind == "roll" else rows
        return RollingWindows(
            window=torch.tensor([context.window for context in rolls], dtype=torch.int32, device=device),
            sinks=torch.tensor([context.sinks for context in rolls], dtype=torch.int32, device=device),
            sink_query_positions=torch.tensor(stand, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class RaggedBatch:
    """A step's tokens laid end to end: T tokens of S sequences, R of which need a next token."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, each token's place in its sequence's view."""
    row_sequence: Tensor
    """[T] int32, which of the S sequences a token belongs to."""
    block_tables: Tensor
    """[S, most blocks] int32, -1 beyond a sequence's own."""
    sampled_rows: Tensor
    """[R] int64, rows whose logits are wanted, in the order of the chunks."""
    rolling: RollingWindows | None
    """None where no sequence rolls."""

    @staticmethod
    def of(step: Step, device: torch.device) -> RaggedBatch:
        tokens: list[int] = []
        positions: list[int] = []
        row_sequence: list[int] = []
        sampled_rows: list[int] = []
        width = max(len(chunk.sequence.blocks) for chunk in step.chunks)
        tables = []
        for index, chunk in enumerate(step.chunks):
            tokens += chunk.sequence.view(chunk.start, chunk.count)
            positions += range(chunk.start, chunk.start + chunk.count)
            row_sequence += [index] * chunk.count
            tables.append(chunk.sequence.blocks + [-1] * (width - len(chunk.sequence.blocks)))
            if chunk.samples:
                sampled_rows.append(len(tokens) - 1)
        return RaggedBatch(
            tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            row_sequence=torch.tensor(row_sequence, dtype=torch.int32, device=device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
            sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64, device=device),
            rolling=RollingWindows.of(step, device),
        )

    @cached_property
    def positions32(self) -> Tensor:
        """[T] int32."""
        return self.positions.to(torch.int32)

    @cached_property
    def length(self) -> int:
        """One more than the largest position."""
        return int(self.positions.max()) + 1

    def windows(self, own: int | None) -> Tensor | None:
        """[S] int32, the window of each sequence in a layer with a window of its `own`; None where nobody has any."""
        if own is None:
            return None if self.rolling is None else self.rolling.window
        window = torch.full_like(self.block_tables[:, 0], own)
        if self.rolling is None:
            return window
        return torch.where(self.rolling.window > 0, torch.minimum(window, self.rolling.window), window)
