"""A program while it is recorded: where the numbers of tensors lie, and the instructions so far.

Tensors are known by the memory that they lie in. What is made of tokens or positions has a buffer, whose rows are the
step's; any view of it is an operand, found without an instruction where its numbers are a run in every row. Everything
else is a constant. What operators become (operators.py) is written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pellucid_model.kernels.interface import Table
from pellucid_model.kernels.plan.program import Copy, Gather, Operand, Phase, Program, Rearrange, Select
from pellucid_model.kernels.plan.rows import Columns, NotRecordable, columns_of, row_dimension, rows_first


class Tape:
    """Instructions for `rows` rows, whose numbers mean nothing."""

    def __init__(self, rows: int) -> None:
        self.program = Program()
        self.rows = rows
        self.indices: dict[int, Literal["tokens", "positions"]] = {}
        """Of the int64 inputs, by address."""
        self.paused = False
        """Whether operators run without being recorded."""
        self._phase: Phase = "tokens"
        self._buffers: dict[int, int] = {}
        """By the address of a tensor's memory."""
        self._unreadable: set[int] = set()
        """Addresses of what operators make beside their result; no instruction makes it."""
        self._kept: list[Tensor] = []
        """All that was made, so that no address is used twice."""
        self._random = torch.Generator().manual_seed(rows)

    def add(self, instruction: Any) -> None:
        self.program.instructions.append(instruction)

    def operand(self, x: Tensor) -> Operand:
        """Where the numbers of x lie, the row's dimension first; gathered in a buffer where they are no run.

        Raises NotRecordable where rows meet.
        """
        buffer, columns = self._columns(x)
        if columns.adjacent:
            return Operand(buffer, columns.begin, columns.width)
        out = self.buffer(columns.width)
        self.add(Rearrange(Operand(buffer, 0, self.program.widths[buffer]), columns.numbers.int(), 0.0, out))
        return out

    def operand_as(self, x: Tensor, like: Tensor) -> Operand:
        """The operand of x spread over the shape of another tensor."""
        return self.operand(self.unseen(lambda: x.expand(like.shape)))

    def target(self, x: Tensor) -> Operand:
        """Where an instruction may write x. Raises NotRecordable where that is no run in every row."""
        buffer, columns = self._columns(x)
        if not columns.adjacent:
            raise NotRecordable(f"it changes a view {list(x.shape)} whose numbers do not lie together")
        return Operand(buffer, columns.begin, columns.width)

    def whole(self, x: Tensor) -> Operand:
        """The operand of x as a buffer of its own: copied where it is a part of a wider one."""
        operand = self.operand(x)
        if operand.width == self.program.widths[operand.buffer]:
            return operand
        own = self.buffer(operand.width)
        self.add(Copy(operand, own))
        return own

    def buffer(self, width: int) -> Operand:
        """A new one."""
        return Operand(self.program.new_buffer(width, self._phase), 0, width)

    def new(self, shape: tuple[int, ...], at: int) -> Tensor:
        """Numbers in a buffer of their own, whose rows run over dimension `at`, or are all there is without rows."""
        out: Tensor = self.unseen(lambda: rows_first(shape, at, self.rows).uniform_(generator=self._random))
        self._kept.append(out)
        width = out.numel() // self.rows
        self._buffers[out.untyped_storage().data_ptr()] = self.program.new_buffer(width, self._phase)
        return out

    def new_like(self, x: Tensor) -> Tensor:
        return self.new(tuple(x.shape), self.row_dimension(x))

    def settled(self, made: Tensor, args: Sequence[Any]) -> Tensor:
        """What an operator made, in a buffer of its own unless it was there before: rows lie one after the other."""
        if self.is_row(made):
            return made
        sources = (x for x in tensors_in(args) if self.is_row(x) or x.untyped_storage().data_ptr() in self.indices)
        source = next(sources, None)
        at = 0
        if source is not None and self.is_row(source):
            at = row_dimension(source, self.rows, self._width(source))
            at += max(0, made.dim() - source.dim())
        if at >= made.dim() or made.shape[at] != self.rows:
            at = next((dim for dim, size in enumerate(made.shape) if size == self.rows), 0)
        if made.dtype != torch.float32 or made.numel() % self.rows:
            raise NotRecordable(f"it makes a tensor {list(made.shape)} of {made.dtype}, not numbers for each row")
        return self.new(tuple(made.shape), at)

    def set_apart(self, made: Tensor) -> None:
        """What an operator makes beside its result: nothing may read it."""
        self._kept.append(made)
        self._unreadable.add(made.untyped_storage().data_ptr())

    def select(self, hidden: Operand) -> Tensor:
        """The rows of `hidden` that are sampled; from now on there are no others."""
        self._phase = "sampled"
        selected = self.new((self.rows, hidden.width), 0)
        self.add(Select(hidden, self.operand(selected)))
        return selected

    def gather(self, out: Tensor, table: Table, indices: Tensor) -> None:
        name = self.indices.get(indices.untyped_storage().data_ptr())
        as_given = indices.storage_offset() == 0 and indices.is_contiguous() and indices.dtype == torch.int64
        if name is None or indices.numel() != self.rows or not as_given:
            raise NotRecordable("it looks up rows by something else than tokens or positions")
        self.add(Gather(table, name, self.target(out)))

    def constant(self, x: Tensor) -> Tensor:
        """x itself. Raises NotRecordable where it is made of tokens or positions."""
        if self.depends([x]):
            raise NotRecordable(f"it computes with a tensor of {x.dtype} that is made of tokens or positions")
        return x

    def depends(self, args: Sequence[Any]) -> bool:
        """Whether any argument is made of tokens or positions; what is not is a constant."""
        addresses = {x.untyped_storage().data_ptr() for x in tensors_in(args)}
        return not addresses.isdisjoint({*self._buffers, *self.indices, *self._unreadable})

    def is_row(self, x: Any) -> bool:
        """Whether it is made of tokens or positions, as numbers of a buffer."""
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self._buffers

    def row_dimension(self, x: Tensor) -> int:
        return row_dimension(x, self.rows, self._width(x))

    def unseen(self, make: Callable[[], Any]) -> Any:
        """What a function returns whose operators are not recorded."""
        paused, self.paused = self.paused, True
        try:
            return make()
        finally:
            self.paused = paused

    def _columns(self, x: Tensor) -> tuple[int, Columns]:
        buffer = self._buffers.get(x.untyped_storage().data_ptr())
        if buffer is None or x.dtype != torch.float32:
            raise NotRecordable(f"it computes with a tensor of {x.dtype} that is made of neither tokens nor positions")
        if self.program.phases[buffer] != self._phase:
            raise NotRecordable("logits uses what forward computed besides its result")
        columns: Columns = self.unseen(lambda: columns_of(x, self.rows, self.program.widths[buffer]))
        return buffer, columns

    def _width(self, x: Tensor) -> int:
        """Of the buffer that x lies in."""
        return self.program.widths[self._buffers[x.untyped_storage().data_ptr()]] if self.is_row(x) else 0


def tensors_in(args: Sequence[Any]) -> list[Tensor]:
    """Those among the arguments, and in lists among them."""
    flat = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,))]
    return [x for x in flat if isinstance(x, Tensor)]
