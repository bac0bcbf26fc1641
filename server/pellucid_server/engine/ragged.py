"""A step's tokens laid end to end, with all that says where they stand and what they see.

StepRows has it in plain arrays, which is all that a plan needs and costs least to make; RaggedBatch in tensors.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid_server.engine.sequence import Step
from pellucid_server.kv.window import FULL


@dataclass(frozen=True)
class RollingWindows:
    """Windows and sinks of a batch in which some sequence rolls that may have grown beyond its window."""

    window: Tensor
    """[S] int32; 0: the sequence does not roll."""
    sinks: Tensor
    """[S] int32."""
    sink_query_positions: Tensor
    """[T] int32: where a row stands when it looks at sinks that its window has left behind."""

    @staticmethod
    def of(step: Step, length: int) -> RollingWindows | None:
        """On the CPU; None where no window is shorter than `length`, so that every row sees all before it."""
        contexts = [chunk.sequence.request.context for chunk in step.chunks]
        if min([context.window for context in contexts if context.kind == "roll"], default=length) >= length:
            return None
        rolls = [context if context.kind == "roll" else FULL for context in contexts]
        stand: list[int] = []
        for chunk, context in zip(step.chunks, rolls, strict=True):
            rows = range(chunk.start, chunk.start + chunk.rows)
            stand += [min(t, context.span - 1) for t in rows] if context.kind == "roll" else rows
        return RollingWindows(
            window=torch.tensor([context.window for context in rolls], dtype=torch.int32),
            sinks=torch.tensor([context.sinks for context in rolls], dtype=torch.int32),
            sink_query_positions=torch.tensor(stand, dtype=torch.int32),
        )

    @property
    def spans(self) -> array[int]:
        """[S] "i": tokens that window and sinks hold; 0: the sequence does not roll."""
        return array("i", torch.where(self.window > 0, self.window + self.sinks, 0).tolist())

    def to(self, device: torch.device) -> RollingWindows:
        """The same on a device."""
        return RollingWindows(**_moved(self, device))


@dataclass(frozen=True, slots=True)
class StepRows:
    """T tokens of S sequences, R of which need a next token. Arrays of type "q" are int64, those of "i" int32."""

    tokens: array[int]
    """[T] "q"."""
    positions: array[int]
    """[T] "q", each token's place in its sequence's view."""
    positions32: array[int]
    """The same as "i"."""
    row_sequence: array[int]
    """[T] "i", which of the S sequences a token belongs to."""
    block_tables: array[int]
    """[S * table_width] "i", -1 beyond a sequence's own."""
    table_width: int
    sampled_rows: array[int]
    """[R] "q", rows whose logits are wanted, in the order of the chunks."""
    length: int
    """One more than the largest position."""
    rolling: RollingWindows | None
    """None where no rolling window hides anything."""

    @staticmethod
    def of(step: Step) -> StepRows:
        tokens: list[int] = []
        positions: list[int] = []
        row_sequence = array("i")
        block_tables: list[int] = []
        sampled_rows: list[int] = []
        width = max([len(chunk.sequence.blocks) for chunk in step.chunks])
        length = 0
        for index, chunk in enumerate(step.chunks):
            sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.rows
            tokens += sequence.view(start, chunk.count)
            if end - start == 1:
                positions.append(start)
                row_sequence.append(index)
            else:
                tokens += chunk.draft
                positions += range(start, end)
                row_sequence += array("i", [index]) * (end - start)
            length = max(length, end)
            block_tables += sequence.blocks
            if len(sequence.blocks) < width:
                block_tables += [-1] * (width - len(sequence.blocks))
            if chunk.samples:
                sampled_rows += range(len(tokens) - 1 - len(chunk.draft), len(tokens))
        return StepRows(
            tokens=array("q", tokens),
            positions=array("q", positions),
            positions32=array("i", positions),
            row_sequence=row_sequence,
            block_tables=array("i", block_tables),
            table_width=width,
            sampled_rows=array("q", sampled_rows),
            length=length,
            rolling=RollingWindows.of(step, length + step.repeats - 1),
        )

    def windows(self, own: int | None) -> Tensor | None:
        """[S] int32, the window of each sequence in a layer with a window of its `own`; None where nobody has any."""
        return _windows(own, self.rolling, len(self.block_tables) // self.table_width)


@dataclass(frozen=True)
class RaggedBatch:
    """The same as tensors."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    row_sequence: Tensor
    """[T] int32."""
    block_tables: Tensor
    """[S, table width] int32."""
    sampled_rows: Tensor
    """[R] int64."""
    rolling: RollingWindows | None

    @staticmethod
    def of(rows: StepRows) -> RaggedBatch:
        """On the CPU."""
        return RaggedBatch(
            tokens=_tensor(rows.tokens),
            positions=_tensor(rows.positions),
            row_sequence=_tensor(rows.row_sequence),
            block_tables=_tensor(rows.block_tables).view(-1, rows.table_width),
            sampled_rows=_tensor(rows.sampled_rows),
            rolling=rows.rolling,
        )

    def to(self, device: torch.device) -> RaggedBatch:
        """The same on a device; itself where it is there already."""
        return self if self.tokens.device.type == device.type else RaggedBatch(**_moved(self, device))

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
        return _windows(own, self.rolling, len(self.block_tables), self.tokens.device)


def _windows(
    own: int | None, rolling: RollingWindows | None, sequences: int, device: torch.device | None = None
) -> Tensor | None:
    if own is None:
        return None if rolling is None else rolling.window
    window = torch.full((sequences,), own, dtype=torch.int32, device=device)
    if rolling is None:
        return window
    return torch.where(rolling.window > 0, torch.minimum(window, rolling.window), window)


def _tensor(numbers: array[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers))


def _moved(batch: RollingWindows | RaggedBatch, device: torch.device) -> dict[str, Any]:
    """Its fields on a device."""
    values = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    return {name: None if value is None else value.to(device) for name, value in values}
