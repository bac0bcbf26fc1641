"""A recorded program, compiled into the instructions of src/plan_instructions.h.

In: the program, the compiled kernels, and the cache it attends over. Out: an array of C structures, the addresses in
which stay good as long as it lives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import get_args

from torch import Tensor

from pellucid_model.contract import Rotary
from pellucid_model.kernels.fused import NORMS, LinearLayer, address, linear_arguments, linear_layer
from pellucid_model.kernels.native import CACHE_FORMATS, TABLE_FORMATS, AttentionArguments, NativeKernels
from pellucid_model.kernels.plan.program import (
    PHASES,
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
    Program,
    Rearrange,
    Reduce,
    Reduction,
    Select,
)

_KINDS = (Gather, Select, Copy, Rearrange, Combine, Reduce, Linear, Normalize, Activate, Attention)
_ARITHMETIC: tuple[str, ...] = get_args(Arithmetic)
_REDUCTIONS: tuple[str, ...] = get_args(Reduction)
_ROWS, _SAME_FOR_ALL_ROWS, _NUMBER = range(3)


class _Place(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in ("start", "stride", "offset", "width", "phase", "rounded_stride"))


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


class CompiledProgram:
    """What a plan runs."""

    def __init__(self, program: Program, kernels: NativeKernels, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """caches: keys and values of every layer, which stay where they are."""
        if program.logits is None:
            raise ValueError("the program has no logits")
        attentions = [each for each in program.instructions if isinstance(each, Attention)]
        self.rotaries: list[Rotary] = list({id(r): r for each in attentions if (r := each.options.rotary)}.values())
        self.windows: list[int | None] = list(dict.fromkeys(each.options.window for each in attentions))
        self.vocab_size = program.widths[program.logits.buffer]
        self._program = program
        self._kernels = kernels
        self._caches = caches
        self._places, self.arena_widths = program.places()
        stride = kernels.library.pellucid_rounded_stride
        self._rounded_strides: dict[int, int] = {
            buffer: stride(c_int64(program.widths[buffer])) for buffer in program.rounded()
        }
        self._kept: list[object] = []
        self._logits_buffer = program.logits.buffer
        compiled = [self._compile(each) for each in program.instructions]
        self._instructions = (_Instruction * len(compiled))(*compiled)
        self.logits_begin = next(index for index, each in enumerate(program.instructions) if isinstance(each, Select))
        """The first instruction of those that make logits of hidden states."""

    def __len__(self) -> int:
        return len(self._instructions)

    def address(self, place: int) -> int:
        """Of an instruction."""
        return ctypes.addressof(self._instructions) + place * ctypes.sizeof(_Instruction)

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
        if any(layer.out.buffer == instruction.x.buffer for layer in instruction.layers):
            raise ValueError("a linear layer writes what it reads")
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
        phase = PHASES.index(program.phases[buffer])
        stride = self._rounded_strides.get(buffer, 0)
        return _Place(start, program.widths[buffer], operand.offset, operand.width, phase, stride)

    def _function(self, name: str) -> int | None:
        return ctypes.cast(getattr(self._kernels.library, f"pellucid_{name}"), c_void_p).value

    def _keep(self, tensor: Tensor | None) -> int | None:
        """Address of a tensor that the instructions use as long as they live."""
        self._kept.append(tensor)
        return address(tensor)


def _float32(table: Tensor | None) -> Tensor | None:
    return None if table is None else table.float().contiguous()
