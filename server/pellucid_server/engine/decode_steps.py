"""Steps in which every sequence computes one token, run in batches of a few fixed sizes so that each can be recorded.

In: a ragged batch with a row for each sequence. It is copied into the inputs of the smallest bucket that holds it, in
one transfer. Rows that are left over compute the token 0 of a sequence that lies in a spare block, which nobody reads.
Out: hidden states and logits of the rows that count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pellucid_server.engine.flash import FlashBatch
from pellucid_server.engine.graphs import Computation, Recorder
from pellucid_server.engine.ragged import RaggedBatch

ModelStep = Callable[[Tensor, FlashBatch], tuple[Tensor, Tensor]]
"""tokens [B] int64 and where they lie -> hidden [B, d_model], logits [B, V]."""


class Bucket:
    """The inputs of `rows` sequences in memory that never moves, filled anew for every step.

    A row of `packed` [rows, 2 + width] int32 is a sequence's token, its position and its block table.
    """

    def __init__(self, rows: int, width: int, spare_block: int, block_size: int, device: torch.device) -> None:
        self.rows, self.width = rows, width
        self._block_size = block_size
        self._padding = torch.tensor([0, 0] + [spare_block] * width, dtype=torch.int32)
        on_gpu = device.type == "cuda"
        self._staged = self._padding.repeat(rows, 1).pin_memory() if on_gpu else self._padding.repeat(rows, 1)
        self._packed = self._staged.to(device, copy=True)

    def fill(self, batch: RaggedBatch) -> None:
        """With at most `rows` sequences, on the CPU. The step before must have been read by now."""
        count, width = batch.block_tables.shape
        self._staged[:] = self._padding
        self._staged[:count, 0] = batch.tokens
        self._staged[:count, 1] = batch.positions
        self._staged[:count, 2 : 2 + width] = batch.block_tables.clamp(min=0)
        self._packed.copy_(self._staged, non_blocking=True)

    def inputs(self) -> tuple[Tensor, FlashBatch]:
        """tokens [rows], and where they lie; made by operators on the device out of what it was filled with."""
        tokens, positions = self._packed[:, 0].long(), self._packed[:, 1].long()
        return tokens, FlashBatch.of_single_rows(positions, self._packed[:, 2:], self._block_size)


class DecodeSteps:
    """Runs such steps, in buckets of so many sequences of so many blocks."""

    def __init__(
        self,
        step: ModelStep,
        recorder: Recorder,
        *,
        buckets: Sequence[tuple[int, int]],
        spare_block: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Record every bucket. RuntimeError where the recorder cannot.

        buckets  sequences and the blocks that each may have, ascending
        """
        self._buckets: list[tuple[Bucket, Computation]] = []
        for rows, width in reversed(buckets):
            bucket = Bucket(rows, width, spare_block, block_size, device)
            self._buckets.insert(0, (bucket, recorder(_computation(step, bucket))))  # the largest memory first

    def takes(self, batch: RaggedBatch) -> bool:
        """Whether every sequence has one row, a bucket holds them, and no rolling window hides anything.

        Somebody must sample, too: then the step is read before its inputs are filled again.
        """
        if len(batch.tokens) != len(batch.block_tables) or len(batch.sampled_rows) == 0 or self._find(batch) is None:
            return False
        window = None if batch.rolling is None else batch.rolling.window
        return window is None or bool(((window == 0) | (batch.positions < window)).all())

    def run(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """A batch that `takes` accepts, on the CPU -> hidden [B, d_model] and logits [B, V] of its bucket, whose first
        rows are the batch's; valid until the next step.
        """
        found = self._find(batch)
        if found is None:
            raise ValueError(f"no bucket holds {list(batch.block_tables.shape)} block tables")
        bucket, compute = found
        bucket.fill(batch)
        return compute()

    def _find(self, batch: RaggedBatch) -> tuple[Bucket, Computation] | None:
        """The first bucket that holds the batch."""
        rows, width = batch.block_tables.shape
        return next((each for each in self._buckets if each[0].rows >= rows and each[0].width >= width), None)


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, … and most."""
    return [1 << power for power in range((most - 1).bit_length())] + [most]


def _computation(step: ModelStep, bucket: Bucket) -> Computation:
    return lambda: step(*bucket.inputs())
