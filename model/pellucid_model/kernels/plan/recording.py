"""Records what a module's `forward` and `logits` compute, as a Program that runs without the module.

The accelerated module is run on a few rows, whose numbers mean nothing. Its layers hand their calls to a recorder in
the kernels' place; what it does with tensors in between is seen by torch's dispatcher, and operators.py says what
becomes of it. Views need no instruction: an operand is found by the memory that it lies in (tape.py). A module that
does anything else (another operator, a shape or a branch that depends on the rows, numbers taken out of torch) raises
NotRecordable with the reason, and then runs as it is.

To be sure that nothing depends on rows or on the numbers in them, the module is recorded twice: with other tokens and
positions, another number of rows and other numbers in all that is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from pellucid_model.kernels.plan.program import Activate, Attention, Layer, Linear, Normalize, Program
from pellucid_model.kernels.plan.rows import NotRecordable
from pellucid_model.kernels.plan.tape import Tape
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
    tape = Tape(rows)
    recorder, program = Recorder(tape), tape.program
    tokens, positions = (torch.full((rows,), number) for _ in range(2))
    tape.indices = {tokens.data_ptr(): "tokens", positions.data_ptr(): "positions"}
    try:
        with torch.no_grad(), _kernels_replaced(module, recorder), recorder, NumbersStay(tape.constant):
            hidden = tape.operand(model.forward(tokens, positions, _RecordingAttend(recorder)))
            program.logits = tape.whole(model.logits(tape.select(hidden)))
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
    """In the place of kernels, of `attend`, and between the module and torch; writes a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.kernels: Kernels | None = None
        """Those that it stands in for."""
        self._norms = RootMeanSquare()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, for a second

    # What layers call in the kernels' place

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        tape, source = self.tape, self.tape.whole(x)
        if source.width != packed.in_features:
            raise NotRecordable(f"a layer for {packed.in_features} numbers gets {source.width}")
        out = tape.new((*x.shape[:-1], packed.out_features), tape.row_dimension(x))
        tape.add(Linear(source, (Layer(packed, tape.operand(out)),)))
        return out

    def look_up(self, indices: Tensor, table: Table) -> Tensor:
        if not self.tape.depends([indices]) and self.kernels is not None:
            return self.kernels.look_up(indices, table)  # a constant, such as a bias for each distance
        out = self.tape.new((*indices.shape, table.width), indices.dim() - 1)
        self.tape.gather(out, table, indices)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return self._normalized(x, Norm("rms", eps, weight))

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return self._normalized(x, Norm("layer", eps, weight, bias))

    def activation(self, kind: Function, x: Tensor) -> Tensor:
        out = self.tape.new_like(x)
        self.tape.add(Activate(kind, self.tape.operand(x), self.tape.operand(out)))
        return out

    def attention(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, options: AttentionOptions) -> Tensor:
        out = self.tape.new(tuple(q.shape), 0)
        self.tape.add(
            Attention(
                layer=layer,
                q=self.tape.operand(q),
                k=None if k is None else self.tape.operand(k),
                v=None if v is None else self.tape.operand(v),
                out=self.tape.operand(out),
                query_heads=q.shape[1],
                options=options,
            )
        )
        return out

    def _normalized(self, x: Tensor, norm: Norm) -> Tensor:
        out = self.tape.new_like(x)
        self.tape.add(Normalize(self.tape.operand(x), norm, x.shape[-1], self.tape.operand(out)))
        return out

    # What torch's dispatcher shows

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, tape = kwargs or {}, self.tape
        if tape.paused or function.is_view or function in _SAME_MEMORY or not tape.depends(args):
            return function(*args, **kwargs)
        norm = self._norms.complete(function, args)
        handler = handler_of(function)
        if handler is None:
            raise NotRecordable(f"it uses {function}")
        out = tape.unseen(lambda: function(*args, **kwargs))
        made, *others = out if isinstance(out, tuple) else (out,)
        made = tape.settled(made, args)
        for other in others:
            tape.set_apart(other)
        if norm is not None:
            x, eps = norm
            tape.add(Normalize(tape.operand(x), Norm("rms", eps), x.shape[-1], tape.target(made)))
        else:
            handler(tape, made, *args, **kwargs)
            self._norms.follow(function, args, made)
        return (made, *others) if others else made


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
