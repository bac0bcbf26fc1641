"""Where the rows of a recorded tensor lie: which dimension counts them, and which numbers of a row a view shows.

A buffer's memory is [rows, width]. A view of it may have the rows in any dimension, as [1, H, T, D] has, and may show
any of a row's numbers in any order, some of them twice; but always the same ones of every row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class NotRecordable(Exception):
    """Why a module's step cannot be turned into a program; one line."""


def row_dimension(x: Tensor, rows: int, width: int) -> int:
    """The dimension of x that counts rows; the first one where several dimensions do together, as in [T · H, D]."""
    return next((d for d in range(x.dim()) if x.shape[d] == rows and x.stride(d) == width), 0)


def columns_of(x: Tensor, rows: int, width: int) -> Tensor:
    """The numbers of a row [n] int64 that a view x of a buffer [rows, width] shows. Raises NotRecordable."""
    if x.numel() == 0 or x.numel() % rows:
        raise NotRecordable(f"it computes with a view {list(x.shape)} that is no number of columns of the rows")
    places = torch.arange(rows * width).as_strided(x.shape, x.stride(), x.storage_offset())
    by_row = places.movedim(row_dimension(x, rows, width), 0).reshape(rows, -1)
    columns = by_row - width * torch.arange(rows)[:, None]
    if not bool(((columns == columns[0]) & (columns >= 0) & (columns < width)).all()):
        raise NotRecordable(f"it computes with a view {list(x.shape)} in which rows meet")
    return columns[0]


def rows_first(shape: tuple[int, ...], at: int, rows: int) -> Tensor:
    """Zeros of this shape, in memory of [rows, width]: dimension `at` counts the rows where it is as large."""
    if shape[at] != rows:
        if math.prod(shape[: at + 1]) % rows:
            raise NotRecordable(f"it makes a tensor {list(shape)}, which has not {rows} rows")
        return torch.zeros(shape)
    rest = (*shape[:at], *shape[at + 1 :])
    return torch.zeros(rows, *rest).movedim(0, at)
