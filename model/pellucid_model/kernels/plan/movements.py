"""What becomes of operators that leave numbers as they are: concatenation, padding, copies, selections, look-ups.

The operator itself is run on the numbers' places, which says where each number of its result comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid_model.kernels.interface import Table
from pellucid_model.kernels.plan.program import Combine, Copy, Operand, Rearrange
from pellucid_model.kernels.plan.rows import NotRecordable

if TYPE_CHECKING:
    from pellucid_model.kernels.plan.recording import Recorder

aten = torch.ops.aten
_ROW = 2**32
"""A number's place is _ROW times its row plus its column; -1: it is filled in."""


def movement(function: Any) -> Callable[..., None]:
    """For an operator of this kind without numbers of its own."""
    return partial(_move, function=function)


def join(r: Recorder, out: Tensor, tensors: Sequence[Tensor], dim: int = 0, *, function: Any) -> None:
    """cat and stack. A constant among the tensors becomes numbers of each row too."""
    at = next(r.row_dimension(x) for x in tensors if r.is_row(x))
    rows = [x if r.is_row(x) else _constant_rows(r, x, at) for x in tensors]
    _move(r, out, rows, dim, function=function)


def _constant_rows(r: Recorder, x: Tensor, at: int) -> Tensor:
    """A constant with the same numbers in every row, which dimension `at` counts, as numbers of each row."""
    if x.dim() <= at or x.shape[at] != r.rows or x.numel() == 0:
        raise NotRecordable(f"it joins rows and a constant {list(x.shape)}, which has other rows")
    by_row: Tensor = r.unseen(lambda: r.constant(x).float().movedim(at, 0).reshape(r.rows, -1))
    if not r.unseen(lambda: torch.equal(by_row, by_row[:1].expand_as(by_row))):
        raise NotRecordable("it joins rows and a constant that differs by row")
    out = r.new(tuple(x.shape), at)
    target = r.target(out)
    r.add(Rearrange(target, torch.full((target.width,), -1, dtype=torch.int32), 1.0, target))
    r.add(Combine("multiply", target, r.unseen(by_row[0].clone), target))
    return out


def copy(r: Recorder, out: Tensor, x: Tensor, **options: Any) -> None:
    _move(r, out, x, function=aten.clone.default)


def pad(r: Recorder, out: Tensor, x: Tensor, pad: Sequence[int], value: float = 0.0) -> None:
    _move(r, out, x, pad, -1, function=aten.constant_pad_nd.default, fill=float(value))


def masked_fill(r: Recorder, out: Tensor, x: Tensor, mask: Tensor, value: Any) -> None:
    number: float = r.unseen(lambda: float(value))
    _move(r, out, x, mask, -1, function=aten.masked_fill.Scalar, fill=number)


def where(r: Recorder, out: Tensor, condition: Tensor, x: Tensor, y: Tensor) -> None:
    number = y if r.is_row(x) else x
    if r.is_row(number) or number.numel() != 1:
        raise NotRecordable("it chooses between numbers by another condition than a constant mask over one constant")
    fill: float = r.unseen(lambda: float(number))
    filled: Tensor = r.unseen(lambda: torch.full_like(number, -1, dtype=torch.int64))
    values = (x, filled) if number is y else (filled, y)
    _move(r, out, condition, *values, function=aten.where.self, fill=fill)


def assign(r: Recorder, out: Tensor, _: Tensor, source: Tensor, *options: Any) -> None:
    if not r.is_row(source):
        raise NotRecordable("it copies a constant into rows")
    x, target = r.operand_as(source, out), r.target(out)
    if x.buffer == target.buffer and abs(x.offset - target.offset) < target.width:
        raise NotRecordable("it copies numbers of a row onto others that overlap with them")
    r.add(Copy(x, target))


def fill(r: Recorder, out: Tensor, _: Tensor, value: Any) -> None:
    target = r.target(out)
    number: float = r.unseen(lambda: float(value))
    r.add(Rearrange(target, torch.full((target.width,), -1, dtype=torch.int32), number, target))


def _move(r: Recorder, out: Tensor, *args: Any, function: Any, fill: float = 0.0, **options: Any) -> None:
    """Run the operator on places, and see from where each number of the result comes."""
    sources: list[Operand] = []

    def places(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(map(places, x))
        if not r.is_row(x):
            return r.constant(x) if isinstance(x, Tensor) else x
        begin = sum(each.width for each in sources)
        operand = r.operand(x)
        sources.append(operand)
        dim = r.row_dimension(x)
        inner = torch.arange(begin, begin + operand.width) + _ROW * torch.arange(r.rows)[:, None]
        return inner.view(x.movedim(dim, 0).shape).movedim(0, dim)

    def columns() -> Tensor:
        made = function(*map(places, args)).movedim(r.row_dimension(out), 0).reshape(r.rows, -1)
        by_row = torch.where(made < 0, -1, made - _ROW * torch.arange(r.rows)[:, None])
        if not bool(((by_row == by_row[0]) & (by_row < _ROW)).all()):
            raise NotRecordable("it moves numbers from one row to another")
        return by_row[0]

    _fetch(r, sources, r.unseen(columns).int(), fill, r.target(out))


def _fetch(r: Recorder, sources: list[Operand], columns: Tensor, fill: float, out: Operand) -> None:
    """out[row, j] = the columns[j]-th number of all sources, laid end to end."""
    width = sum(each.width for each in sources)
    in_order = torch.equal(columns, torch.arange(width, dtype=torch.int32))
    if len(sources) == 1 and not in_order:
        r.add(Rearrange(sources[0], columns, fill, out))
        return
    joined = out if in_order else r.buffer(width)
    begin = joined.offset
    for source in sources:
        r.add(Copy(source, replace(joined, offset=begin, width=source.width)))
        begin += source.width
    if not in_order:
        r.add(Rearrange(joined, columns, fill, out))


def embedding(r: Recorder, out: Tensor, table: Tensor, indices: Tensor, *_: Any) -> None:
    if table.dtype != torch.float32 or not table.is_contiguous() or r.is_row(table):
        raise NotRecordable("it looks up rows of a table that is not float32 and contiguous")
    r.gather(out, Table(table.detach(), table.shape[0], out.numel() // r.rows, "float32"), indices)


def index(r: Recorder, out: Tensor, table: Tensor, indices: Sequence[Tensor | None]) -> None:
    if r.is_row(table):
        if any(index is not None and r.indices.get(index.untyped_storage().data_ptr()) for index in indices):
            raise NotRecordable("it selects numbers of a row by tokens or positions")
        _move(r, out, table, list(indices), function=aten.index.Tensor)
    elif len(indices) == 1 and indices[0] is not None:
        embedding(r, out, table, indices[0])
    else:
        raise NotRecordable("it looks up rows by something else than tokens or positions")


def index_select(r: Recorder, out: Tensor, table: Tensor, dim: int, index: Tensor) -> None:
    if r.is_row(table):
        _move(r, out, table, dim, index, function=aten.index_select.default)
    elif dim == 0:
        embedding(r, out, table, index)
    else:
        raise NotRecordable("it selects along another dimension than the first")
