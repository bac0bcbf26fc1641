"""A step's forward pass, from the ragged batch to logits: the module itself, or the plan recorded of it.

Both give the same numbers to the last bit. A plan runs without Python between operators, which is what small models and
single tokens are bound by otherwise; a module that cannot be recorded runs as it is.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from pellucid_model.contract import DecoderModel
from pellucid_model.kernels import Kernels, NativeKernels
from pellucid_model.kernels.plan import NotRecordable, Plan, PlanBatch, fuse, record
from pellucid_server.engine.cache import KVCache
from pellucid_server.engine.paged import Angles, PagedAttend
from pellucid_server.engine.ragged import RaggedBatch


class Forward(Protocol):
    """Runs one step after the other."""

    def run(self, batch: RaggedBatch) -> Tensor:
        """Write the batch's keys and values -> logits [R, V] of its sampled rows; [0, 0] where there are none."""
        ...

    def more_logits(self, rows: Tensor) -> Tensor:
        """Logits [n, V] of other rows [n] int64 of the batch that ran last."""
        ...


class ModuleForward:
    """Calls the module."""

    def __init__(self, model: DecoderModel, kernels: Kernels, cache: KVCache, device: torch.device) -> None:
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._angles = Angles(device)
        self._hidden = torch.empty(0)

    def run(self, batch: RaggedBatch) -> Tensor:
        attend = PagedAttend(self._kernels, self._cache, self._angles, batch)
        self._hidden = self._model.forward(batch.tokens, batch.positions, attend)
        if len(batch.sampled_rows) == 0:
            return torch.empty(0, 0)  # modules need not cope with no rows
        return self.more_logits(batch.sampled_rows)

    def more_logits(self, rows: Tensor) -> Tensor:
        return self._model.logits(self._hidden.index_select(0, rows))


class PlannedForward:
    """Runs the plan of a module."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        self._angles = Angles(device)
        self._batch: PlanBatch | None = None

    def run(self, batch: RaggedBatch) -> Tensor:
        rolling = batch.rolling
        self._batch = PlanBatch(
            tokens=batch.tokens,
            positions=batch.positions,
            positions32=batch.positions32,
            row_sequence=batch.row_sequence,
            block_tables=batch.block_tables,
            sampled_rows=batch.sampled_rows,
            windows=[batch.windows(own) for own in self._plan.windows],
            angles=[self._angles.upto(batch.length, rotary) for rotary in self._plan.rotaries],
            sinks=None if rolling is None else rolling.sinks,
            sink_query_positions=None if rolling is None else rolling.sink_query_positions,
        )
        return self._plan.run(self._batch)

    def more_logits(self, rows: Tensor) -> Tensor:
        if self._batch is None:
            raise ValueError("no batch has run")
        return self._plan.more_logits(self._batch, rows)


def planned(module: nn.Module, model: DecoderModel, kernels: NativeKernels, cache: KVCache) -> PlannedForward:
    """The plan of an accelerated module. Raises NotRecordable."""
    program = record(module, model)
    fuse(program)
    return PlannedForward(Plan(program, kernels, cache.layers), torch.device("cpu"))


def choose_forward(
    module: nn.Module, model: DecoderModel, kernels: Kernels, cache: KVCache, device: torch.device, notices: list[str]
) -> Forward:
    """The module's plan where it can be recorded, else the module, with a notice that says why."""
    if isinstance(kernels, NativeKernels):
        try:
            return planned(module, model, kernels, cache)
        except NotRecordable as reason:
            notices.append(f"the model's steps run in Python, which is slower where it is small: {reason}")
    return ModuleForward(model, kernels, cache, device)
