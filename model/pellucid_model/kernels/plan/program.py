"""What a recorded step consists of: instructions over row buffers, and the memory that they share.

A buffer holds `width` float32 numbers for every row of a phase. There are two phases: `tokens`, the T rows of
`forward`, and `sampled`, the R rows of `logits`. An operand is a run of numbers in every row of a buffer, so that what
a module does with views (chunk, unflatten, slices of the last dimension) costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor

from pellucid_model.contract import AttentionOptions
from pellucid_model.kernels.fused import Norm
from pellucid_model.kernels.interface import Activation, Function, PackedLinear, Table

Phase = Literal["tokens", "sampled"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Numbers of the C++ arrays are places in it."""
Arithmetic = Literal["add", "subtract", "multiply", "divide", "maximum", "minimum"]
Reduction = Literal["sum", "maximum"]


@dataclass(frozen=True)
class Operand:
    """Numbers offset … offset + width - 1 of every row of a buffer."""

    buffer: int
    offset: int
    width: int


@dataclass(frozen=True, eq=False)
class Gather:
    """out[row] = table[index[row]]: embeddings, learned and tabulated positions."""

    table: Table
    index: Literal["tokens", "positions"]
    out: Operand


@dataclass(frozen=True, eq=False)
class Select:
    """out[r] = x[sampled row r]: from the rows of `forward` to those of `logits`."""

    x: Operand
    out: Operand


@dataclass(frozen=True, eq=False)
class Copy:
    x: Operand
    out: Operand


@dataclass(frozen=True, eq=False)
class Rearrange:
    """out[row, j] = x[row, columns[j]], or `fill` where that is -1. columns [width of out] int32."""

    x: Operand
    columns: Tensor
    fill: float
    out: Operand


@dataclass(frozen=True, eq=False)
class Reduce:
    """Of each `size` numbers of a row one: their sum, or the largest."""

    kind: Reduction
    x: Operand
    size: int
    out: Operand


@dataclass(frozen=True, eq=False)
class Combine:
    """out = a (kind) b, elementwise; b is another operand, the same numbers for every row, or one number.

    maximum and minimum take no other operand, and are NaN where a is.
    """

    kind: Arithmetic
    a: Operand
    b: Operand | Tensor | float
    out: Operand


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer and what follows it: out = residual + activation(gate(x)) * packed(x), where each part may lack.

    Without a gate the activation is of the layer itself, and then there is no residual.
    """

    packed: PackedLinear
    out: Operand
    gate: PackedLinear | None = None
    activation: Activation | None = None
    residual: Operand | None = None


@dataclass(frozen=True, eq=False)
class Linear:
    """Layers of one x, or of its norm. All operands are whole buffers."""

    x: Operand
    layers: tuple[Layer, ...]
    norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class Normalize:
    """Over each `size` numbers of a row, so that it also normalises heads one by one."""

    x: Operand
    norm: Norm
    size: int
    out: Operand


@dataclass(frozen=True, eq=False)
class Activate:
    kind: Function
    x: Operand
    out: Operand


@dataclass(frozen=True, eq=False)
class Attention:
    """See Kernels.paged_attention. q, out [Hq · D] numbers of a row.

    layer  whose cache it is
    k, v   [Hkv · D] numbers of a row; None where another layer's are used
    """

    layer: int
    q: Operand
    k: Operand | None
    v: Operand | None
    out: Operand
    query_heads: int
    options: AttentionOptions


Changed = TypeVar("Changed", bound="Instruction | Layer")
Instruction = Gather | Select | Copy | Rearrange | Combine | Reduce | Linear | Normalize | Activate | Attention


def writes(instruction: Instruction) -> list[Operand]:
    """Operands whose numbers it makes."""
    return [each.out for each in instruction.layers] if isinstance(instruction, Linear) else [instruction.out]


def reads(instruction: Instruction) -> list[Operand]:
    """Operands whose numbers it needs."""
    if isinstance(instruction, Linear):
        return [instruction.x, *(each.residual for each in instruction.layers if each.residual is not None)]
    values = [getattr(instruction, each.name) for each in dataclasses.fields(instruction) if each.name != "out"]
    return [value for value in values if isinstance(value, Operand)]


def renamed(instruction: Instruction, buffers: Mapping[int, int]) -> Instruction:
    """The same on other buffers, where there are any instead."""

    def moved(value: Operand) -> Operand:
        return dataclasses.replace(value, buffer=buffers.get(value.buffer, value.buffer))

    def with_moved(owner: Changed) -> Changed:
        values = ((each.name, getattr(owner, each.name)) for each in dataclasses.fields(owner))
        operands: Any = {name: moved(value) for name, value in values if isinstance(value, Operand)}
        return dataclasses.replace(owner, **operands)

    if isinstance(instruction, Linear):
        instruction = dataclasses.replace(instruction, layers=tuple(with_moved(each) for each in instruction.layers))
    return with_moved(instruction)


@dataclass
class Program:
    """Instructions in the order they run."""

    instructions: list[Instruction] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    """Of every buffer, numbers per row."""
    phases: list[Phase] = field(default_factory=list)
    """Of every buffer."""
    logits: Operand | None = None
    """Where the answer lies; fills its buffer."""

    def new_buffer(self, width: int, phase: Phase) -> int:
        self.widths.append(width)
        self.phases.append(phase)
        return len(self.widths) - 1

    def drop_unread(self) -> None:
        """Leave out what nobody reads. Attention is always kept: it writes keys and values."""
        needed = set() if self.logits is None else {self.logits.buffer}
        kept: list[Instruction] = []
        for each in reversed(self.instructions):
            if isinstance(each, Attention) or any(operand.buffer in needed for operand in writes(each)):
                kept.append(each)
                needed |= {operand.buffer for operand in reads(each)}
        self.instructions = kept[::-1]

    def places(self) -> tuple[list[int], dict[Phase, int]]:
        """Where each buffer begins in its phase's arena, in numbers per row, and how wide the arenas are.

        Buffers whose lives do not overlap share memory: the first gap that is wide enough is taken, in the order in
        which buffers are first written. Every place is a multiple of 16, so a row count of 16 keeps cache lines whole.
        """
        first, last = self._lives()
        places = [0] * len(self.widths)
        arenas: dict[Phase, int] = {"tokens": 0, "sampled": 0}
        placed: set[int] = set()
        answer = None if self.logits is None else self.logits.buffer  # lies elsewhere
        for buffer in sorted(first.keys() - {answer}, key=lambda each: first[each]):
            phase, width = self.phases[buffer], _rounded(self.widths[buffer])
            taken = sorted(
                (places[other], places[other] + _rounded(self.widths[other]))
                for other in first
                if self.phases[other] == phase and other in placed and first[buffer] <= last[other]
            )
            start = 0
            for begin, end in taken:
                if start + width <= begin:
                    break
                start = max(start, end)
            places[buffer] = start
            placed.add(buffer)
            arenas[phase] = max(arenas[phase], start + width)
        return places, arenas

    @property
    def in_float32(self) -> bool:
        """Whether no layer rounds its input to a narrower format."""
        layers = (layer for each in self.instructions if isinstance(each, Linear) for layer in each.layers)
        return all(layer.packed.format == "float32" for layer in layers)

    def rounded(self) -> set[int]:
        """Buffers that layers or attention make whole, and that only layers read which round them to bfloat16."""
        made: set[int] = set()
        rounded: set[int] = set()
        otherwise = set() if self.logits is None else {self.logits.buffer}
        for each in self.instructions:
            makes_rounded = isinstance(each, Linear | Attention)
            for out in writes(each):
                (made if makes_rounded and self.is_whole(out) else otherwise).add(out.buffer)
            inputs = reads(each)
            if isinstance(each, Linear) and each.norm is None and each.layers[0].packed.format == "bfloat16":
                rounded.add(each.x.buffer)
                inputs = inputs[1:]
            otherwise.update(operand.buffer for operand in inputs)
        return (made & rounded) - otherwise

    def whole(self, buffer: int) -> Operand:
        """All of a buffer."""
        return Operand(buffer, 0, self.widths[buffer])

    def is_whole(self, operand: Operand) -> bool:
        """Whether it is all of its buffer."""
        return operand.width == self.widths[operand.buffer]

    def _lives(self) -> tuple[dict[int, int], dict[int, int]]:
        """Index of the first and last instruction that touches each buffer."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, instruction in enumerate(self.instructions):
            for operand in (*reads(instruction), *writes(instruction)):
                first.setdefault(operand.buffer, index)
                last[operand.buffer] = index
        return first, last


def _rounded(width: int) -> int:
    return -(-width // 16) * 16
