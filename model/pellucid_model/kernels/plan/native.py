"""A recorded program, compiled into the instructions of src/plan.cpp, and one call that runs them all."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import TypeAlias, get_args

import torch
from torch import Tensor

from pellucid_model.contract import Rotary
from pellucid_model.kernels import library
from pellucid_model.kernels.fused import NORMS, LinearLayer, address, linear_arguments, linear_layer
from pellucid_model.kernels.huge_pages import untouched_zeros
from pellucid_model.kernels.native import (
    CACHE_FORMATS,
    TABLE_FORMATS,
    AttentionArguments,
    NativeKernels,
    attention_error,
)
from pellucid_model.kernels.plan.program import (
    Activate,
    Arithmetic,
    Attention,
    Combine,
    Copy,
    Gather,
    Instruction,
    Linear,
    Normalize,
    Operand,
    Phase,
    Program,
    Rearrange,
    Reduce,
    Reduction,
    Select,
)

_KINDS = (Gather, Select, Copy, Rearrange, Combine, Reduce, Linear, Normalize, Activate, Attention)
_PHASES: tuple[Phase, ...] = get_args(Phase)
_ARITHMETIC: tuple[str, ...] = get_args(Arithmetic)
_REDUCTIONS: tuple[str, ...] = get_args(Reduction)
_BEYOND_TABLE = -1
_ROWS, _SAME_FOR_ALL_ROWS, _NUMBER = range(3)


class _Place(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in ("start", "stride", "offset", "width", "phase"))


class _Instruction(ctypes.Structure):
    _fields_ = (
        *((name, _Place) for name in ("a", "b", "c", "out")),
        *((name, c_void_p) for name in ("call", "first", "second")),
        ("size", c_int64),
        ("number", c_float),
        *((name, c_int32) for name in ("kind", "variant", "other", "window", "rotary")),
    )


class _LayerPlaces(ctypes.Structure):
    _fields_ = (("out", _Place), ("residual", _Place))


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


class Plan:
    """Runs a program. Owns its memory between steps, that of the logits too; one step at a time."""

    def __init__(self, program: Program, kernels: NativeKernels, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """caches: keys and values of every layer, which stay where they are."""
        attentions = [each for each in program.instructions if isinstance(each, Attention)]
        self.rotaries: list[Rotary] = list({id(r): r for each in attentions if (r := each.options.rotary)}.values())
        self.windows: list[int | None] = list(dict.fromkeys(each.options.window for each in attentions))
        self._program = program
        self._kernels = kernels
        self._caches = caches
        self._places, self._arena_widths = program.places()
        self._kept: list[object] = []
        compiled = [self._compile(each) for each in program.instructions]
        self._instructions = (_Instruction * len(compiled))(*compiled)
        self._logits_begin = next(index for index, each in enumerate(program.instructions) if isinstance(each, Select))
        self._vocab_size = program.widths[self._logits_buffer]
        self._memory: dict[str, Tensor] = {}
        self._run = kernels.library.pellucid_run_plan
        self._run.restype = c_int32

    def run(self, batch: PlanBatch) -> Tensor:
        """Compute the step -> logits [R, V] float32 of its sampled rows, valid until the next step.

        ValueError where the batch does not fit the cache; see paged_attention.
        """
        logits = self._logits("logits", len(batch.sampled_rows))
        self._call(batch, batch.sampled_rows, logits, 0, len(self._instructions))
        return logits

    def more_logits(self, batch: PlanBatch, rows: Tensor) -> Tensor:
        """Logits [n, V] float32 of other rows [n] int64 of the batch that ran last, valid until more are asked for."""
        logits = self._logits("more logits", len(rows))
        self._call(batch, rows, logits, self._logits_begin, len(self._instructions))
        return logits

    def _call(self, batch: PlanBatch, sampled_rows: Integers, logits: Tensor, begin: int, end: int) -> None:
        if len(sampled_rows) == 0:
            end = min(end, self._logits_begin)
        rows = {"tokens": len(batch.tokens), "sampled": len(sampled_rows)}
        windows = (c_void_p * max(1, len(batch.windows)))(*(address(each) for each in batch.windows))
        angles = (_Angles * max(1, len(batch.angles)))(
            *(_Angles(cos.data_ptr(), sin.data_ptr(), len(cos)) for cos, sin in batch.angles)
        )
        call = _Batch(
            rows=tuple(rows[phase] for phase in _PHASES),
            arena=tuple(self._held(p, rows[p] * self._arena_widths[p]).data_ptr() for p in _PHASES),
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
        first = ctypes.addressof(self._instructions) + begin * ctypes.sizeof(_Instruction)
        status: int = self._run(c_void_p(first), c_int64(end - begin), ctypes.byref(call))
        if status == _BEYOND_TABLE:
            raise IndexError("a token or a position is beyond the table that it is looked up in")
        if status:
            raise attention_error(status, (call.sequences, call.table_width), self._caches[0][0])

    def _logits(self, name: str, rows: int) -> Tensor:
        size = rows * self._vocab_size
        return self._held(name, size)[:size].view(rows, self._vocab_size)

    def _held(self, name: str, size: int) -> Tensor:
        """At least `size` float32 numbers: the same memory for the same name, until it is too small.

        It comes straight from the system and goes back there whole. From the C library's heap it would not: holes that
        are too small for the next larger step stay behind.
        """
        held = self._memory.get(name)
        if held is None or len(held) < size:
            self._memory.pop(name, None)  # before there is more
            held = self._memory[name] = untouched_zeros((size,), torch.float32)
        return held

    @property
    def _logits_buffer(self) -> int:
        if self._program.logits is None:
            raise ValueError("the program has no logits")
        return self._program.logits.buffer

    def _compile(self, instruction: Instruction) -> _Instruction:
        compiled = _Instruction(kind=_KINDS.index(type(instruction)), rotary=-1)
        if not isinstance(instruction, Linear):
            compiled.out = self._place(instruction.out)
        match instruction:
            case Gather(table, index):
                compiled.first, compiled.variant = self._keep(table.weight), int(index == "positions")
                compiled.size, compiled.other = table.count, TABLE_FORMATS.index(table.format)
            case Select(x) | Copy(x):
                compiled.a = self._place(x)
            case Rearrange(x, columns, fill):
                compiled.a, compiled.first, compiled.number = self._place(x), self._keep(columns), fill
            case Reduce(kind, x, size):
                compiled.a, compiled.variant, compiled.size = self._place(x), _REDUCTIONS.index(kind), size
            case Combine(kind, a, b):
                compiled.variant, compiled.a = _ARITHMETIC.index(kind), self._place(a)
                self._set_second(compiled, b)
            case Linear():
                self._set_linear(compiled, instruction)
            case Normalize(x, norm, size):
                compiled.a, compiled.variant = self._place(x), NORMS.index(norm.kind)
                compiled.number, compiled.size = norm.eps, size
                compiled.first, compiled.second = self._keep(norm.weight), self._keep(norm.bias)
            case Activate(kind, x):
                compiled.a, compiled.call = self._place(x), self._function(kind)
            case Attention():
                self._set_attention(compiled, instruction)
        return compiled

    def _set_second(self, compiled: _Instruction, b: Operand | Tensor | float) -> None:
        if isinstance(b, Operand):
            compiled.b, compiled.other = self._place(b), _ROWS
        elif isinstance(b, Tensor):
            compiled.first, compiled.other = self._keep(b), _SAME_FOR_ALL_ROWS
        else:
            compiled.number, compiled.other = b, _NUMBER

    def _set_linear(self, compiled: _Instruction, instruction: Linear) -> None:
        layers = (LinearLayer * len(instruction.layers))(
            *(linear_layer(each.packed, each.gate, each.activation) for each in instruction.layers)
        )
        places = (_LayerPlaces * len(layers))(
            *(
                _LayerPlaces(
                    self._place(layer.out), _Place() if layer.residual is None else self._place(layer.residual)
                )
                for layer in instruction.layers
            )
        )
        fixed = linear_arguments(layers, instruction.layers[0].packed, instruction.norm)
        self._kept += [instruction, layers, places, fixed]
        compiled.a, compiled.out = self._place(instruction.x), self._place(instruction.layers[0].out)
        compiled.first, compiled.second = ctypes.addressof(fixed), ctypes.addressof(places)

    def _set_attention(self, compiled: _Instruction, instruction: Attention) -> None:
        keys, values = self._caches[instruction.layer]
        blocks, kv_heads, block_size, _ = keys.shape
        options = instruction.options
        rotary, bias = options.rotary, options.distance_bias
        fixed = AttentionArguments(
            k_cache=keys.data_ptr(),
            v_cache=values.data_ptr(),
            alibi_slopes=self._keep(_float32(options.alibi_slopes)),
            distance_bias=self._keep(_float32(bias)),
            bias_width=0 if bias is None else bias.shape[1],
            query_heads=instruction.query_heads,
            kv_heads=kv_heads,
            head_dim=instruction.q.width // instruction.query_heads,
            blocks=blocks,
            block_size=block_size,
            block_stride=keys.stride(0),
            rotary_dim=rotary.dim if rotary else 0,
            scale=options.scale,
            softcap=options.softcap or 0.0,
            interleaved=rotary is not None and rotary.interleaved,
            cache_format=CACHE_FORMATS.index(keys.dtype),
        )
        self._kept.append(fixed)
        compiled.first, compiled.a = ctypes.addressof(fixed), self._place(instruction.q)
        if instruction.k is not None and instruction.v is not None:
            compiled.b, compiled.c = self._place(instruction.k), self._place(instruction.v)
            compiled.variant = 1
        compiled.window, compiled.other = self.windows.index(options.window), int(options.window is None)
        if rotary is not None:
            compiled.rotary = next(i for i, each in enumerate(self.rotaries) if each is rotary)

    def _place(self, operand: Operand) -> _Place:
        program, buffer = self._program, operand.buffer
        start = -1 if buffer == self._logits_buffer else self._places[buffer]
        phase = _PHASES.index(program.phases[buffer])
        return _Place(start, program.widths[buffer], operand.offset, operand.width, phase)

    def _function(self, name: str) -> int | None:
        return ctypes.cast(getattr(self._kernels.library, f"pellucid_{name}"), c_void_p).value

    def _keep(self, tensor: Tensor | None) -> int | None:
        """Address of a tensor that the instructions use as long as they live."""
        self._kept.append(tensor)
        return address(tensor)


def _float32(table: Tensor | None) -> Tensor | None:
    return None if table is None else table.float().contiguous()
