"""A recorded program's native calls: one for a step, or for several in a row."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pellucid_model.kernels import library
from pellucid_model.kernels.fused import address
from pellucid_model.kernels.huge_pages import untouched_zeros
from pellucid_model.kernels.native import NativeKernels, attention_error
from pellucid_model.kernels.plan.instructions import CompiledProgram
from pellucid_model.kernels.plan.program import PHASES, Phase, Program

_BEYOND_TABLE = -1
_ROWS_BEHIND = 31
"""That layers may read behind the last one; as in src/linear_arguments.h."""


class _Angles(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("positions", c_int64))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64 * 2),
        ("arena", c_void_p * 2),
        *((name, c_void_p) for name in ("logits", "tokens", "positions", "sampled_rows")),
        *((name, c_void_p) for name in ("positions32", "row_sequence", "block_tables")),
        *((name, c_void_p) for name in ("windows", "sinks", "sink_query_positions", "angles")),
        *((name, c_int64) for name in ("sequences", "table_width")),
        ("threads", c_int32),
    )


class _Steps(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("most", "vocab", "stride")),
        *((name, c_void_p) for name in ("settings", "end_ids", "end_begins", "spans")),
        ("until", c_double),
        ("descriptor", c_int32),
        ("outgoing", c_char_p),
        ("outgoing_size", c_int64),
        *((name, c_void_p) for name in ("sampled", "ended")),
        *((name, c_int64) for name in ("done", "written")),
    )


Integers: TypeAlias = "Tensor | array[int]"
"""An array costs less to make."""


@dataclass(frozen=True)
class PlanBatch:
    """A step's inputs: T tokens of S sequences, R of which need logits. Types and meanings as in `paged_attention`."""

    tokens: Integers
    """[T] int64."""
    positions: Integers
    """[T] int64."""
    positions32: Integers
    """The same as int32."""
    row_sequence: Integers
    """[T] int32."""
    block_tables: Integers
    """[S * table_width] int32, one sequence's after the other."""
    table_width: int
    sampled_rows: Integers
    """[R] int64."""
    windows: Sequence[Tensor | None]
    """For each of `Plan.windows`: the window of every sequence in layers of that kind."""
    angles: Sequence[tuple[Tensor, Tensor]]
    """For each of `Plan.rotaries`: cos and sin, reaching beyond the largest position."""
    sinks: Tensor | None = None
    sink_query_positions: Tensor | None = None


@dataclass(frozen=True)
class StepSampling:
    """How several steps in a row sample for S sequences, and when they end early."""

    most: int
    """Steps, at least 1."""
    vocab_size: int
    """Ids that may be sampled."""
    settings: array[int]
    """A Row of src/sampler_row.h for each sequence, without banned ids; output_index moves on in place."""
    end_ids: array[int]
    """int64, those of all sequences, one after the other: the step in which one of them is sampled is the last."""
    end_begins: array[int]
    """[S + 1] int32."""
    until: float
    """Seconds of the monotonic clock: no further step begins after this moment."""
    descriptor: int
    """Or when this file can be read; -1: none."""
    outgoing: bytes = b""
    """What one thread writes to that file while the others begin: its reader may take its processor for a while."""


class StepsRun(NamedTuple):
    """What came of several steps in a row."""

    sampled: array[int]
    """[steps * S] int32, -1 where there was none to choose."""
    ended: array[float]
    """[steps] float64, when each step had sampled, in seconds of the monotonic clock."""
    logits: Tensor
    """[S, V] float32 of the last one, valid until the next step."""
    written: int
    """Bytes of `outgoing`: all of them, unless nobody reads them any more."""


class Plan:
    """Runs a program. Owns its memory between steps, that of the logits too; one step at a time."""

    def __init__(self, program: Program, kernels: NativeKernels, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """caches: keys and values of every layer, which stay where they are."""
        self._compiled = CompiledProgram(program, kernels, caches)
        self.rotaries, self.windows = self._compiled.rotaries, self._compiled.windows
        self._caches = caches
        self._memory: dict[str, Tensor] = {}
        self._run = kernels.library.pellucid_run_plan
        self._run_steps = kernels.library.pellucid_run_steps
        self._run.restype = self._run_steps.restype = c_int32

    def run(self, batch: PlanBatch) -> Tensor:
        """Compute the step -> logits [R, V] float32 of its sampled rows, valid until the next step.

        ValueError where the batch does not fit the cache; see paged_attention.
        """
        logits = self._logits("logits", len(batch.sampled_rows))
        self._call(batch, batch.sampled_rows, logits, 0, len(self._compiled))
        return logits

    def more_logits(self, batch: PlanBatch, rows: Tensor) -> Tensor:
        """Logits [n, V] float32 of other rows [n] int64 of the batch that ran last, valid until more are asked for."""
        logits = self._logits("more logits", len(rows))
        self._call(batch, rows, logits, self._compiled.logits_begin, len(self._compiled))
        return logits

    def run_steps(self, batch: PlanBatch, sampling: StepSampling, spans: array[int] | None = None) -> StepsRun:
        """Compute the step and further ones, each of the tokens that were sampled before it.

        batch  one row for each sequence, all of which are sampled. Tokens and positions move on in place. Block tables
               and angles reach as far as the last step does.
        spans  [S] int32, how many tokens a rolling window and its sinks hold, 0: none
        """
        sequences = len(batch.sampled_rows)
        logits = self._logits("logits", sequences)
        sampled = array("i", bytes(4 * sampling.most * sequences))
        ended = array("d", bytes(8 * sampling.most))
        steps = _Steps(
            most=sampling.most,
            vocab=sampling.vocab_size,
            stride=self._compiled.vocab_size,
            settings=address(sampling.settings),
            end_ids=address(sampling.end_ids),
            end_begins=address(sampling.end_begins),
            spans=address(spans),
            until=sampling.until,
            descriptor=sampling.descriptor,
            outgoing=sampling.outgoing,
            outgoing_size=len(sampling.outgoing),
            sampled=address(sampled),
            ended=address(ended),
        )
        self._call(batch, batch.sampled_rows, logits, 0, len(self._compiled), steps)
        return StepsRun(sampled[: steps.done * sequences], ended[: steps.done], logits, steps.written)

    def _call(
        self,
        batch: PlanBatch,
        sampled_rows: Integers,
        logits: Tensor,
        begin: int,
        end: int,
        steps: _Steps | None = None,
    ) -> None:
        if len(sampled_rows) == 0:
            end = min(end, self._compiled.logits_begin)
        rows = {"tokens": len(batch.tokens), "sampled": len(sampled_rows)}
        windows = (c_void_p * max(1, len(batch.windows)))(*(address(each) for each in batch.windows))
        angles = (_Angles * max(1, len(batch.angles)))(
            *(_Angles(cos.data_ptr(), sin.data_ptr(), cos.shape[0]) for cos, sin in batch.angles)
        )
        call = _Batch(
            rows=tuple(rows[phase] for phase in PHASES),
            arena=tuple(self._arena(phase, rows[phase]).data_ptr() for phase in PHASES),
            logits=logits.data_ptr(),
            tokens=address(batch.tokens),
            positions=address(batch.positions),
            sampled_rows=address(sampled_rows),
            positions32=address(batch.positions32),
            row_sequence=address(batch.row_sequence),
            block_tables=address(batch.block_tables),
            windows=ctypes.addressof(windows),
            sinks=address(batch.sinks),
            sink_query_positions=address(batch.sink_query_positions),
            angles=ctypes.addressof(angles),
            sequences=len(batch.block_tables) // batch.table_width,
            table_width=batch.table_width,
            threads=library.threads(),
        )
        first = c_void_p(self._compiled.address(begin))
        status: int
        if steps is None:
            status = self._run(first, c_int64(end - begin), ctypes.byref(call))
        else:
            status = self._run_steps(first, c_int64(end - begin), ctypes.byref(call), ctypes.byref(steps))
        if status == _BEYOND_TABLE:
            raise IndexError("a token or a position is beyond the table that it is looked up in")
        if status:
            raise attention_error(status, (call.sequences, call.table_width), self._caches[0][0])

    def _arena(self, phase: Phase, rows: int) -> Tensor:
        return self._held(phase, (rows + _ROWS_BEHIND) * self._compiled.arena_widths[phase])

    def _logits(self, name: str, rows: int) -> Tensor:
        size = rows * self._compiled.vocab_size
        return self._held(name, size)[:size].view(rows, self._compiled.vocab_size)

    def _held(self, name: str, size: int) -> Tensor:
        """At least `size` float32 numbers: the same memory for the same name, until it is too small.

        It comes straight from the system and goes back there whole. From the C library's heap it would not: holes that
        are too small for the next larger step stay behind.
        """
        held = self._memory.get(name)
        if held is None or held.numel() < size:
            self._memory.pop(name, None)  # before there is more
            held = self._memory[name] = untouched_zeros((size,), torch.float32)
        return held
