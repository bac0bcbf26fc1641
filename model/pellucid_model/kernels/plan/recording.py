"""Records what a module's `forward` and `logits` compute, as a Program that runs without the module.

The accelerated module is run on a few rows, whose numbers mean nothing. Its layers hand their calls to a recorder in
the kernels' place; what it does with tensors in between is seen by torch's dispatcher, and operators.py says what
becomes of it. Views need no instruction: an operand is found by the memory that it lies in (rows.py). A module that
does anything else (another operator, a shape or a branch that depends on the rows, numbers taken out of torch) raises
NotRecordable with the reason, and then runs as it is.

To be sure that nothing depends on rows or on the numbers in them, the module is recorded twice: with other tokens and
positions, another number of rows and other numbers in all that is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid_model.contract import Attend, AttentionOptions, DecoderModel, Rotary
from pellucid_model.gathered import Gathered
from pellucid_model.kernels.fused import Norm
from pellucid_model.kernels.interface import Function, Kernels, PackedLinear, Table
from pellucid_model.kernels.modules import TWINS
from pellucid_model.kernels.plan.guards import NumbersStay, same
from pellucid_model.kernels.plan.idioms import RootMeanSquare
from pellucid_model.kernels.plan.operators import handler_of
from pellucid_model.kernels.plan.program import (
    Activate,
    Attention,
    Copy,
    Gather,
    Layer,
    Linear,
    Normalize,
    Operand,
    Phase,
    Program,
    Rearrange,
    Select,
)
from pellucid_model.kernels.plan.rows import Columns, NotRecordable, columns_of, row_dimension, rows_first
from pellucid_model.user_module import one_line

aten = torch.ops.aten
ROWS = {0: 3, 1: 5}
"""Every token and position of a recording, and how many rows it has."""
_SAME_MEMORY = (aten._unsafe_view.default, aten.lift_fresh.default)
"""Not called views, but as good as."""


def record(module: nn.Module, model: DecoderModel) -> Program:
    """The program of an accelerated module, in evaluation mode on the CPU. Raises NotRecordable.

    module, model  the same object, as torch and as the contract see it
    """
    program, again = (_record(module, model, number, rows) for number, rows in ROWS.items())
    if not same(program, again):
        raise NotRecordable("what the module computes depends on the number of rows, or on numbers as Python sees them")
    return program


def _record(module: nn.Module, model: DecoderModel, number: int, rows: int) -> Program:
    recorder = Recorder(rows)
    tokens, positions = (torch.full((rows,), number) for _ in range(2))
    recorder.indices = {tokens.data_ptr(): "tokens", positions.data_ptr(): "positions"}
    program = recorder.program
    try:
        with torch.no_grad(), _kernels_replaced(module, recorder), recorder, NumbersStay(recorder.constant):
            hidden = recorder.operand(model.forward(tokens, positions, _RecordingAttend(recorder)))
            selected = recorder.begin_logits(hidden)
            program.logits = recorder.whole(model.logits(selected))
    except NotRecordable:
        raise
    except Exception as error:
        raise NotRecordable(f"it cannot be followed: {one_line(error)}") from error
    program.drop_unread()
    return program


@contextmanager
def _kernels_replaced(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """The recorder stands in for the kernels of every accelerated layer."""
    twins = [each for each in module.modules() if isinstance(each, TWINS)]
    kernels = [twin.kernels for twin in twins]
    recorder.kernels = next(iter(kernels), None)
    for twin in twins:
        twin.kernels = recorder  # type: ignore[assignment]  # it offers what layers call, and no attention
    try:
        yield
    finally:
        for twin, own in zip(twins, kernels, strict=True):
            twin.kernels = own


class Recorder(TorchDispatchMode):
    """In the place of kernels, of `attend`, and between the module and torch."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self.rows = rows
        self.kernels: Kernels | None = None
        """Those that it stands in for."""
        self.indices: dict[int, Literal["tokens", "positions"]] = {}
        """Of the int64 inputs, by address."""
        self._phase: Phase = "tokens"
        self._buffers: dict[int, int] = {}
        """By the address of a tensor's memory."""
        self._unreadable: set[int] = set()
        """Addresses of what operators make beside their result; no instruction makes it."""
        self._norms = RootMeanSquare()
        self._kept: list[Tensor] = []
        """All that was made, so that no address is used twice."""
        self._random = torch.Generator().manual_seed(rows)
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, for a second

    # What layers call in the kernels' place

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        source = self._rowwise(x, packed.in_features)
        out = self.new((*x.shape[:-1], packed.out_features), row_dimension(x, self.rows, self._width(x)))
        self.add(Linear(source, (Layer(packed, self.operand(out)),)))
        return out

    def look_up(self, indices: Tensor, table: Table) -> Tensor:
        if not self._depends([indices]) and self.kernels is not None:
            return self.kernels.look_up(indices, table)  # a constant, such as a bias for each distance
        out = self.new((*indices.shape, table.width), indices.dim() - 1)
        self.gather(out, table, indices)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return self._normalized(x, Norm("rms", eps, weight))

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return self._normalized(x, Norm("layer", eps, weight, bias))

    def activation(self, kind: Function, x: Tensor) -> Tensor:
        out = self._new_like(x)
        self.add(Activate(kind, self.operand(x), self.operand(out)))
        return out

    def attention(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, options: AttentionOptions) -> Tensor:
        out = self.new(tuple(q.shape), 0)
        self.add(
            Attention(
                layer=layer,
                q=self.operand(q),
                k=None if k is None else self.operand(k),
                v=None if v is None else self.operand(v),
                out=self.operand(out),
                query_heads=q.shape[1],
                options=options,
            )
        )
        return out

    def begin_logits(self, hidden: Operand) -> Tensor:
        """From now on rows are those that are sampled."""
        self._phase = "sampled"
        selected = self.new((self.rows, hidden.width), 0)
        self.add(Select(hidden, self.operand(selected)))
        return selected

    def _normalized(self, x: Tensor, norm: Norm) -> Tensor:
        out = self._new_like(x)
        self.add(Normalize(self.operand(x), norm, x.shape[-1], self.operand(out)))
        return out

    # What torch's dispatcher shows

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or function.is_view or function in _SAME_MEMORY or not self._depends(args):
            return function(*args, **kwargs)
        norm = self._norms.complete(function, args)
        handler = handler_of(function)
        if handler is None:
            raise NotRecordable(f"it uses {function}")
        out = self.unseen(lambda: function(*args, **kwargs))
        made, *others = out if isinstance(out, tuple) else (out,)
        made = self._settled(made, args)
        for other in others:
            self._kept.append(other)
            self._unreadable.add(other.untyped_storage().data_ptr())
        if norm is not None:
            x, eps = norm
            self.add(Normalize(self.operand(x), Norm("rms", eps), x.shape[-1], self.target(made)))
        else:
            handler(self, made, *args, **kwargs)
            self._norms.follow(function, args, made)
        return (made, *others) if others else made

    def _settled(self, made: Tensor, args: Sequence[Any]) -> Tensor:
        """What an operator made, in a buffer of its own unless it was there before: rows lie one after the other."""
        if made.untyped_storage().data_ptr() in self._buffers:
            return made
        sources = (x for x in _tensors(args) if self.is_row(x) or x.untyped_storage().data_ptr() in self.indices)
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

    def _depends(self, args: Sequence[Any]) -> bool:
        """Whether any argument is made of tokens or positions; what is not is a constant."""
        addresses = {x.untyped_storage().data_ptr() for x in _tensors(args)}
        return not addresses.isdisjoint({*self._buffers, *self.indices, *self._unreadable})

    # What operators are turned into instructions with

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

    def gather(self, out: Tensor, table: Table, indices: Tensor) -> None:
        name = self.indices.get(indices.untyped_storage().data_ptr())
        as_given = indices.storage_offset() == 0 and indices.is_contiguous() and indices.dtype == torch.int64
        if name is None or indices.numel() != self.rows or not as_given:
            raise NotRecordable("it looks up rows by something else than tokens or positions")
        self.add(Gather(table, name, self.target(out)))

    def constant(self, x: Tensor) -> Tensor:
        """x itself. Raises NotRecordable where it is made of tokens or positions."""
        if self._depends([x]):
            raise NotRecordable(f"it computes with a tensor of {x.dtype} that is made of tokens or positions")
        return x

    def is_row(self, x: Any) -> bool:
        """Whether it is made of tokens or positions, as numbers of a buffer."""
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self._buffers

    def row_dimension(self, x: Tensor) -> int:
        return row_dimension(x, self.rows, self._width(x))

    def unseen(self, make: Callable[[], Any]) -> Any:
        """What a function returns whose operators are not recorded."""
        paused, self._paused = self._paused, True
        try:
            return make()
        finally:
            self._paused = paused

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

    def _rowwise(self, x: Tensor, width: int) -> Operand:
        operand = self.whole(x)
        if operand.width != width:
            raise NotRecordable(f"a layer for {width} numbers gets {operand.width}")
        return operand

    def _new_like(self, x: Tensor) -> Tensor:
        return self.new(tuple(x.shape), self.row_dimension(x))

    def new(self, shape: tuple[int, ...], at: int) -> Tensor:
        """Numbers in a buffer of their own, whose rows run over dimension `at`, or are all there is without rows."""
        out: Tensor = self.unseen(lambda: rows_first(shape, at, self.rows).uniform_(generator=self._random))
        self._kept.append(out)
        width = out.numel() // self.rows
        self._buffers[out.untyped_storage().data_ptr()] = self.program.new_buffer(width, self._phase)
        return out


class _RecordingAttend(Attend):
    """What stands behind `attend` while a program is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        return self._recorder.attention(layer, q, k, v, options)

    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        raise NotRecordable("it gathers keys and values")


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    """Those among the arguments, and in lists among them."""
    flat = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,))]
    return [x for x in flat if isinstance(x, Tensor)]
