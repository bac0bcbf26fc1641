"""A step's forward pass where a fused kernel attends: the module itself on the device, decoding in recorded steps.

A step in which every sequence decodes one token goes through DecodeSteps, which replays a CUDA graph. Any other step,
with prompts in it or with windows that hide something, calls the module on the ragged batch as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid_model.contract import DecoderModel
from pellucid_model.kernels import Kernels
from pellucid_server.engine.cache import KVCache
from pellucid_server.engine.decode_steps import DecodeSteps, bucket_sizes
from pellucid_server.engine.flash import FlashAttend, FlashBatch
from pellucid_server.engine.graphs import Recorder
from pellucid_server.engine.paged import Angles, PagedAttend
from pellucid_server.engine.ragged import RaggedBatch, StepRows
from pellucid_server.engine.varlen import Varlen


@dataclass(frozen=True)
class DecodeShape:
    """What recorded steps must hold."""

    most_rows: int
    """Sequences that run at once."""
    width: int
    """Blocks of the longest sequence."""
    spare_block: int
    """A block of the cache that the pool does not have: the one behind its last."""

    def buckets(self, *, by_width: bool) -> list[tuple[int, int]]:
        """Sequences and blocks of each. by_width: keys are copied, so no more of them than there may be."""
        rows, widths = bucket_sizes(self.most_rows), bucket_sizes(self.width) if by_width else [self.width]
        most = max(2 * self.spare_block, self.width)  # twice what the pool has, since both numbers are rounded up
        return [(row, width) for row in rows for width in widths if not by_width or row * width <= most]


class FlashForward:
    """Runs one step after the other."""

    def __init__(
        self, model: DecoderModel, kernels: Kernels, cache: KVCache, device: torch.device, varlen: Varlen
    ) -> None:
        """kernels: for layers that `varlen` cannot compute."""
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._device = device
        self._varlen = varlen
        self._angles = Angles(device)
        self._decode: DecodeSteps | None = None
        self._hidden = torch.empty(0)

    @torch.inference_mode()
    def record(self, shape: DecodeShape, recorder: Recorder | None, notices: list[str]) -> None:
        """Prepare steps that decode, recorded with `recorder`, None: not recorded. What cannot be becomes a notice.

        RuntimeError where the kernel does not run on this machine at all.
        """
        detours = self._try_out(shape.spare_block)
        if detours:
            rest = f" and {len(detours) - 1} more" if len(detours) > 1 else ""
            notices.append(
                f"{detours[0]}{rest}: torch's fused attention cannot do that, so slower operators run there, "
                "and steps are not recorded as CUDA graphs; see docs/gpu.md"
            )
            return
        if recorder is None:
            return
        # Their own tables, which never grow: a graph keeps the address of what it reads.
        angles, length = Angles(self._device), shape.width * self._cache.block_size

        def step(tokens: Tensor, batch: FlashBatch) -> tuple[Tensor, Tensor]:
            hidden, _ = self._compute(_single_rows(tokens, batch), batch, angles, length)
            return hidden, self._model.logits(hidden)

        try:
            self._decode = DecodeSteps(
                step,
                recorder,
                buckets=shape.buckets(by_width=not self._varlen.reads_pages),
                spare_block=shape.spare_block,
                block_size=self._cache.block_size,
                device=self._device,
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            notices.append(f"decoding is not recorded as CUDA graphs, which is slower for small models: {reason}")

    def run(self, rows: StepRows) -> Tensor:
        batch = RaggedBatch.of(rows)
        sampled = batch.sampled_rows.to(self._device, non_blocking=True)
        if self._decode is not None and self._decode.takes(batch):
            self._hidden, logits = self._decode.run(batch)
            return logits.index_select(0, sampled)  # a copy: the next step writes where these stand
        there = batch.to(self._device)
        flash = FlashBatch.of(batch, there, self._cache.block_size)
        self._hidden, _ = self._compute(there, flash, self._angles, flash.most_keys)
        return self.more_logits(sampled) if len(sampled) else torch.empty(0, 0)

    def more_logits(self, rows: Tensor) -> Tensor:
        return self._model.logits(self._hidden.index_select(0, rows))

    def _compute(self, batch: RaggedBatch, flash: FlashBatch, angles: Angles, length: int) -> tuple[Tensor, list[str]]:
        """hidden [T, d_model], and the layers that took a detour, in their order."""
        paged = PagedAttend(self._kernels, self._cache, angles, batch)
        attend = FlashAttend(self._varlen, self._cache, angles, flash, length, paged)
        hidden = self._model.forward(batch.tokens, batch.positions, attend)
        return hidden, attend.detours

    def _try_out(self, spare_block: int) -> list[str]:
        """Compute one token in the spare block -> layers that `varlen` cannot compute, and why."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        table = torch.full((1, 1), spare_block, dtype=torch.int32, device=self._device)
        flash = FlashBatch.of_single_rows(zero, table, self._cache.block_size)
        return self._compute(_single_rows(zero, flash), flash, self._angles, flash.most_keys)[1]


def _single_rows(tokens: Tensor, batch: FlashBatch) -> RaggedBatch:
    """The ragged batch of S sequences of one row each, on the device. tokens [S] int64"""
    rows = torch.arange(len(tokens), device=tokens.device)
    return RaggedBatch(tokens, batch.positions, rows.to(torch.int32), batch.block_tables, rows, rolling=None)
