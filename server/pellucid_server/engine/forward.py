"""A step's forward pass, from the ragged batch to logits: the module itself, or the plan recorded of it.

Both give the same numbers, to the last bit where the module's reductions are its layers'. A plan runs without Python
between operators, which is what small models and single tokens are bound by otherwise; a module that cannot be
recorded, or whose recording computes something else on a small step (trial.py), runs as it is.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from pellucid_model.contract import DecoderModel
from pellucid_model.kernels import Kernels, NativeKernels
from pellucid_model.kernels.plan import NotRecordable, Plan, PlanBatch, StepSampling, StepsRun, fuse, record
from pellucid_model.user_module import one_line
from pellucid_server.engine.cache import KVCache
from pellucid_server.engine.flash_forward import DecodeShape, FlashForward
from pellucid_server.engine.graphs import GraphRecorder, Recorder
from pellucid_server.engine.paged import Angles, PagedAttend
from pellucid_server.engine.ragged import RaggedBatch, StepRows
from pellucid_server.engine.trial import Trial
from pellucid_server.engine.varlen import Varlen, find_varlen


class Forward(Protocol):
    """Runs one step after the other."""

    def run(self, rows: StepRows) -> Tensor:
        """Write the rows' keys and values -> logits [R, V] of the sampled ones; [0, 0] where there are none."""
        ...

    def more_logits(self, rows: Tensor) -> Tensor:
        """Logits [n, V] of other rows [n] int64 of the step that ran last."""
        ...


class ModuleForward:
    """Calls the module."""

    def __init__(self, model: DecoderModel, kernels: Kernels, cache: KVCache, device: torch.device) -> None:
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._device = device
        self._angles = Angles(device)
        self._hidden = torch.empty(0)

    def run(self, rows: StepRows) -> Tensor:
        batch = RaggedBatch.of(rows).to(self._device)
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

    def run(self, rows: StepRows) -> Tensor:
        self._batch = self._batch_of(rows, rows.length)
        return self._plan.run(self._batch)

    def run_steps(self, rows: StepRows, sampling: StepSampling) -> StepsRun:
        """Run a step of single rows, all sampled, several times, each time with the tokens of the time before."""
        self._batch = None  # it moves on
        spans = None if rows.rolling is None else rows.rolling.spans
        return self._plan.run_steps(self._batch_of(rows, rows.length + sampling.most), sampling, spans)

    def _batch_of(self, rows: StepRows, length: int) -> PlanBatch:
        """`length`: one more than the largest position that is computed."""
        rolling = rows.rolling
        return PlanBatch(
            tokens=rows.tokens,
            positions=rows.positions,
            positions32=rows.positions32,
            row_sequence=rows.row_sequence,
            block_tables=rows.block_tables,
            table_width=rows.table_width,
            sampled_rows=rows.sampled_rows,
            windows=[rows.windows(own) for own in self._plan.windows],
            angles=[self._angles.upto(length, rotary) for rotary in self._plan.rotaries],
            sinks=None if rolling is None else rolling.sinks,
            sink_query_positions=None if rolling is None else rolling.sink_query_positions,
        )

    def more_logits(self, rows: Tensor) -> Tensor:
        if self._batch is None:
            raise ValueError("no batch has run")
        return self._plan.more_logits(self._batch, rows)


def planned(
    module: nn.Module,
    model: DecoderModel,
    kernels: NativeKernels,
    cache: KVCache,
    vocab_size: int,
    context_length: int,
) -> PlannedForward:
    """The plan of an accelerated module, tried beside it in caches of their own. Raises NotRecordable."""
    program = record(module, model)
    fuse(program)
    cpu = torch.device("cpu")

    def plan(own: KVCache) -> PlannedForward:
        return PlannedForward(Plan(program, kernels, own.layers), cpu)

    trial = Trial(cache.shapes, vocab_size, context_length, exact=program.in_float32)
    try:
        apart = trial.disagreement(plan, lambda own: ModuleForward(model, kernels, own, cpu), module)
    except Exception as error:
        raise NotRecordable(f"it cannot be tried beside its recording: {one_line(error)}") from error
    if apart is not None:
        raise NotRecordable(f"its recording computes other numbers, which lie {apart:.2g} of the largest one apart")
    return plan(cache)


def choose_forward(
    module: nn.Module,
    model: DecoderModel,
    kernels: Kernels,
    cache: KVCache,
    device: torch.device,
    decoding: DecodeShape,
    notices: list[str],
    *,
    vocab_size: int,
    context_length: int,
    graphs: bool = True,
) -> Forward:
    """The module's plan where it can be recorded and computes the same, else the module, with a notice that says why.

    On CUDA the module attends by torch's fused kernel and, with `graphs`, decodes in CUDA graphs.
    """
    if device.type == "cuda":
        recorder = GraphRecorder(device) if graphs else None
        return fused_forward(model, kernels, cache, device, find_varlen(device), decoding, recorder, notices)
    if isinstance(kernels, NativeKernels):
        try:
            return planned(module, model, kernels, cache, vocab_size, context_length)
        except NotRecordable as reason:
            notices.append(f"the model's steps run in Python, which is slower where it is small: {reason}")
    return ModuleForward(model, kernels, cache, device)


def fused_forward(
    model: DecoderModel,
    kernels: Kernels,
    cache: KVCache,
    device: torch.device,
    varlen: Varlen | str,
    decoding: DecodeShape,
    recorder: Recorder | None,
    notices: list[str],
) -> Forward:
    """The module with a fused attention kernel under it, or as it is, with a notice, where the kernel does not run.

    varlen    the kernel, or why there is none
    recorder  for steps that decode; None: they are not recorded
    """
    if isinstance(varlen, Varlen):
        forward = FlashForward(model, kernels, cache, device, varlen)
        try:
            forward.record(decoding, recorder, notices)
            return forward
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            varlen = str(error).strip().splitlines()[0]
    notices.append(f"attention runs in single operators, slowly, instead of torch's varlen_attn: {varlen}")
    return ModuleForward(model, kernels, cache, device)
