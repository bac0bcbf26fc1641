"""Where the rows of a recorded tensor lie: which dimension counts them, and which numbers of a row a view shows.

A buffer's memory is [rows, width]. A view of it may have the rows in any dimension, as [1, H, T, D] has, and may show
any of a row's numbers in any order, some of them twice; but always the same ones of every row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


class NotRecordable(Exception):
    """Why a module's step cannot be turned into a program; one line."""


def row_dimension(x: Tensor, rows: int, width: int) -> int:
    """The dimension of x that counts rows; the first one where several dimensions do together, as in [T · H, D]."""
    return next((d for d in range(x.dim()) if x.shape[d] == rows and x.stride(d) == width), 0)


@dataclass(frozen=True, eq=False)
class Columns:
    """The numbers of a row that a view shows."""

    numbers: Tensor
    """[n] int64."""
    begin: int
    width: int
    adjacent: bool
    """Whether they are begin … begin + width - 1."""


def columns_of(x: Tensor, rows: int, width: int) -> Columns:
    """What a view x of a buffer [rows, width] shows. Raises NotRecordable."""
    return _columns_of(tuple(x.shape), x.stride(), x.storage_offset(), row_dimension(x, rows, width), rows, width)


@lru_cache(256)  # layers are alike
def _columns_of(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, row_dimension: int, rows: int, width: int
) -> Columns:
    if math.prod(shape) == 0 or math.prod(shape) % rows:
        raise NotRecordable(f"it computes with a view {list(shape)} that is no number of columns of the rows")
    places = torch.arange(rows * width).as_strided(shape, stride, offset)
    by_row = places.movedim(row_dimension, 0).reshape(rows, -1)
    columns = by_row - width * torch.arange(rows)[:, None]
    if not bool(((columns == columns[0]) & (columns >= 0) & (columns < width)).all()):
        raise NotRecordable(f"it computes with a view {list(shape)} in which rows meet")
    numbers, begin = columns[0], int(columns[0, 0])
    return Columns(numbers, begin, len(numbers), torch.equal(numbers, torch.arange(begin, begin + len(numbers))))


def rows_first(shape: tuple[int, ...], at: int, rows: int) -> Tensor:
    """A tensor of this shape, in memory of [rows, width]: dimension `at` counts the rows where it is as large."""
    if shape[at] != rows:
        if math.prod(shape[: at + 1]) % rows:
            raise NotRecordable(f"it makes a tensor {list(shape)}, which has not {rows} rows")
        return torch.empty(shape)
    rest = (*shape[:at], *shape[at + 1 :])
    return torch.empty(rows, *rest).movedim(0, at)
