"""What becomes of operators that leave numbers as they are: concatenation, padding, copies, selections, look-ups.

The operator itself is run on the numbers' places, which says where each number of its result comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pellucid_model.kernels.interface import Table
from pellucid_model.kernels.plan.program import Combine, Copy, Operand, Rearrange
from pellucid_model.kernels.plan.rows import NotRecordable
from pellucid_model.kernels.plan.tape import Tape

aten = torch.ops.aten
_ROW = 2**32
"""A number's place is _ROW times its row plus its column; -1: it is filled in."""


def movement(function: Any) -> Callable[..., None]:
    """For an operator of this kind without numbers of its own."""
    return partial(_move, function=function)


def join(tape: Tape, out: Tensor, tensors: Sequence[Tensor], dim: int = 0, *, function: Any) -> None:
    """cat and stack. A constant among the tensors becomes numbers of each row too."""
    at = next(tape.row_dimension(x) for x in tensors if tape.is_row(x))
    rows = [x if tape.is_row(x) else _constant_rows(tape, x, at) for x in tensors]
    _move(tape, out, rows, dim, function=function)


def _constant_rows(tape: Tape, x: Tensor, at: int) -> Tensor:
    """A constant with the same numbers in every row, which dimension `at` counts, as numbers of each row."""
    if x.dim() <= at or x.shape[at] != tape.rows or x.numel() == 0:
        raise NotRecordable(f"it joins rows and a constant {list(x.shape)}, which has other rows")
    by_row: Tensor = tape.unseen(lambda: tape.constant(x).float().movedim(at, 0).reshape(tape.rows, -1))
    if not tape.unseen(lambda: torch.equal(by_row, by_row[:1].expand_as(by_row))):
        raise NotRecordable("it joins rows and a constant that differs by row")
    out = tape.new(tuple(x.shape), at)
    target = tape.target(out)
    tape.add(Rearrange(target, torch.full((target.width,), -1, dtype=torch.int32), 1.0, target))
    tape.add(Combine("multiply", target, tape.unseen(by_row[0].clone), target))
    return out


def copy(tape: Tape, out: Tensor, x: Tensor, **options: Any) -> None:
    _move(tape, out, x, function=aten.clone.default)


def pad(tape: Tape, out: Tensor, x: Tensor, pad: Sequence[int], value: float = 0.0) -> None:
    _move(tape, out, x, pad, -1, function=aten.constant_pad_nd.default, fill=float(value))


def masked_fill(tape: Tape, out: Tensor, x: Tensor, mask: Tensor, value: Any) -> None:
    number: float = tape.unseen(lambda: float(value))
    _move(tape, out, x, mask, -1, function=aten.masked_fill.Scalar, fill=number)


def where(tape: Tape, out: Tensor, condition: Tensor, x: Tensor, y: Tensor) -> None:
    number = y if tape.is_row(x) else x
    if tape.is_row(number) or number.numel() != 1:
        raise NotRecordable("it chooses between numbers by another condition than a constant mask over one constant")
    fill: float = tape.unseen(lambda: float(number))
    filled: Tensor = tape.unseen(lambda: torch.full_like(number, -1, dtype=torch.int64))
    values = (x, filled) if number is y else (filled, y)
    _move(tape, out, condition, *values, function=aten.where.self, fill=fill)


def assign(tape: Tape, out: Tensor, _: Tensor, source: Tensor, *options: Any) -> None:
    if not tape.is_row(source):
        raise NotRecordable("it copies a constant into rows")
    x, target = tape.operand_as(source, out), tape.target(out)
    if x.buffer == target.buffer and abs(x.offset - target.offset) < target.width:
        raise NotRecordable("it copies numbers of a row onto others that overlap with them")
    tape.add(Copy(x, target))


def fill(tape: Tape, out: Tensor, _: Tensor, value: Any) -> None:
    target = tape.target(out)
    number: float = tape.unseen(lambda: float(value))
    tape.add(Rearrange(target, torch.full((target.width,), -1, dtype=torch.int32), number, target))


def _move(tape: Tape, out: Tensor, *args: Any, function: Any, fill: float = 0.0, **options: Any) -> None:
    """Run the operator on places, and see from where each number of the result comes."""
    sources: list[Operand] = []

    def places(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(map(places, x))
        if not tape.is_row(x):
            return tape.constant(x) if isinstance(x, Tensor) else x
        begin = sum(each.width for each in sources)
        operand = tape.operand(x)
        sources.append(operand)
        dim = tape.row_dimension(x)
        inner = torch.arange(begin, begin + operand.width) + _ROW * torch.arange(tape.rows)[:, None]
        return inner.view(x.movedim(dim, 0).shape).movedim(0, dim)

    def columns() -> Tensor:
        made = function(*map(places, args)).movedim(tape.row_dimension(out), 0).reshape(tape.rows, -1)
        by_row = torch.where(made < 0, -1, made - _ROW * torch.arange(tape.rows)[:, None])
        if not bool(((by_row == by_row[0]) & (by_row < _ROW)).all()):
            raise NotRecordable("it moves numbers from one row to another")
        return by_row[0]

    _fetch(tape, sources, tape.unseen(columns).int(), fill, tape.target(out))


def _fetch(tape: Tape, sources: list[Operand], columns: Tensor, fill: float, out: Operand) -> None:
    """out[row, j] = the columns[j]-th number of all sources, laid end to end."""
    width = sum(each.width for each in sources)
    in_order = torch.equal(columns, torch.arange(width, dtype=torch.int32))
    if len(sources) == 1 and not in_order:
        tape.add(Rearrange(sources[0], columns, fill, out))
        return
    joined = out if in_order else tape.buffer(width)
    begin = joined.offset
    for source in sources:
        tape.add(Copy(source, replace(joined, offset=begin, width=source.width)))
        begin += source.width
    if not in_order:
        tape.add(Rearrange(joined, columns, fill, out))


def embedding(tape: Tape, out: Tensor, table: Tensor, indices: Tensor, *_: Any) -> None:
    if table.dtype != torch.float32 or not table.is_contiguous() or tape.is_row(table):
        raise NotRecordable("it looks up rows of a table that is not float32 and contiguous")
    tape.gather(out, Table(table.detach(), table.shape[0], out.numel() // tape.rows, "float32"), indices)


def index(tape: Tape, out: Tensor, table: Tensor, indices: Sequence[Tensor | None]) -> None:
    if tape.is_row(table):
        if any(index is not None and tape.indices.get(index.untyped_storage().data_ptr()) for index in indices):
            raise NotRecordable("it selects numbers of a row by tokens or positions")
        _move(tape, out, table, list(indices), function=aten.index.Tensor)
    elif len(indices) == 1 and indices[0] is not None:
        embedding(tape, out, table, indices[0])
    else:
        raise NotRecordable("it looks up rows by something else than tokens or positions")


def index_select(tape: Tape, out: Tensor, table: Tensor, dim: int, index: Tensor) -> None:
    if tape.is_row(table):
        _move(tape, out, table, dim, index, function=aten.index_select.default)
    elif dim == 0:
        embedding(tape, out, table, index)
    else:
        raise NotRecordable("it selects along another dimension than the first")
