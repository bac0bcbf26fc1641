"""Records what a module's `forward` and `logits` compute, as a Program that runs without the module.

The accelerated module is run once on a few rows of zeros. Its layers hand their calls to a recorder in the kernels'
place; what it does with tensors in between is seen by torch's dispatcher. Views need no instruction: an operand is
found by the memory that it lies in. Functions that the kernels have too (relu, gelu, silu, layer_norm, and RMS norms
written out by hand: idioms.py) become the kernels' own, as layers do. A module that does anything else (another
operator, a shape or a branch that depends on the rows) raises NotRecordable with the reason, and then runs as it is.

To be sure that nothing depends on the number of rows, the module is recorded twice, with different numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid_model.contract import Attend, AttentionOptions, DecoderModel, Rotary
from pellucid_model.gathered import Gathered
from pellucid_model.kernels.fused import Norm
from pellucid_model.kernels.interface import Activation, PackedLinear
from pellucid_model.kernels.modules import TWINS
from pellucid_model.kernels.plan.idioms import RootMeanSquare
from pellucid_model.kernels.plan.program import (
    Activate,
    Arithmetic,
    Attention,
    Combine,
    Copy,
    Gather,
    Layer,
    Linear,
    Normalize,
    Operand,
    Phase,
    Program,
    Select,
)

aten = torch.ops.aten
ROWS = (3, 5)
"""Numbers of rows to record with."""
_ARITHMETIC: dict[Any, Arithmetic] = {
    aten.add.Tensor: "add",
    aten.add_.Tensor: "add",
    aten.sub.Tensor: "subtract",
    aten.mul.Tensor: "multiply",
    aten.mul_.Tensor: "multiply",
    aten.div.Tensor: "divide",
    aten.div_.Tensor: "divide",
}
_COPIES = (aten.clone.default, aten._to_copy.default)
_ACTIVATIONS: dict[Any, Activation] = {aten.relu.default: "relu", aten.silu.default: "silu"}


class NotRecordable(Exception):
    """Why a module's step cannot be turned into a program; one line."""


def record(module: nn.Module, model: DecoderModel) -> Program:
    """The program of an accelerated module, in evaluation mode on the CPU. Raises NotRecordable.

    module, model  the same object, as torch and as the contract see it
    """
    program, again = (_record(module, model, rows) for rows in ROWS)
    if not _same(program, again):
        raise NotRecordable("what the module computes depends on the number of rows")
    return program


def _record(module: nn.Module, model: DecoderModel, rows: int) -> Program:
    recorder = _Recorder(rows)
    tokens, positions = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    recorder.indices = {tokens.data_ptr(): "tokens", positions.data_ptr(): "positions"}
    with torch.no_grad(), _kernels_replaced(module, recorder), recorder:
        hidden = recorder.operand(model.forward(tokens, positions, _RecordingAttend(recorder)))
        selected = recorder.begin_logits(hidden)
        logits = model.logits(selected)
    program = recorder.program
    program.logits = recorder.whole(logits)
    return program


@contextmanager
def _kernels_replaced(module: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """The recorder stands in for the kernels of every accelerated layer."""
    twins = [each for each in module.modules() if isinstance(each, TWINS)]
    kernels = [twin.kernels for twin in twins]
    for twin in twins:
        twin.kernels = recorder  # type: ignore[assignment]  # it offers what layers call, and no attention
    try:
        yield
    finally:
        for twin, own in zip(twins, kernels, strict=True):
            twin.kernels = own


class _Recorder(TorchDispatchMode):
    """In the place of kernels, of `attend`, and between the module and torch."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self.indices: dict[int, Literal["tokens", "positions"]] = {}
        """Of the int64 inputs, by address."""
        self._rows = rows
        self._phase: Phase = "tokens"
        self._buffers: dict[int, int] = {}
        """By the address of a tensor's memory."""
        self._unreadable: set[int] = set()
        """Addresses of what operators make beside their result; no instruction makes it."""
        self._norms = RootMeanSquare()
        self._kept: list[Tensor] = []
        """All that was made, so that no address is used twice."""
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, for a second

    # What layers call in the kernels' place

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        out = self._new(*x.shape[:-1], packed.out_features)
        self._add(Linear(self._rowwise(x, packed.in_features), (Layer(packed, self.operand(out)),)))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        out = self._new(*x.shape)
        self._add(Normalize(self.operand(x), Norm("rms", eps, weight), x.shape[-1], self.operand(out)))
        return out

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        out = self._new(*x.shape)
        self._add(Normalize(self.operand(x), Norm("layer", eps, weight, bias), x.shape[-1], self.operand(out)))
        return out

    def activation(self, kind: Activation, x: Tensor) -> Tensor:
        out = self._new(*x.shape)
        self._add(Activate(kind, self.operand(x), self.operand(out)))
        return out

    def attention(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, options: AttentionOptions) -> Tensor:
        out = self._new(*q.shape)
        self._add(
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
        selected = self._new(self._rows, hidden.width)
        self._add(Select(hidden, self.operand(selected)))
        return selected

    # What torch's dispatcher shows

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or function.is_view or not self._depends(args):
            return function(*args, **kwargs)
        if self._is_part_of_a_norm(function, args):
            return self._follow_norm(function, args, kwargs)
        handler = self._handler(function, args)
        if handler is None:
            raise NotRecordable(f"it uses {function}")
        self._paused = True
        try:
            out = function(*args, **kwargs)
        finally:
            self._paused = False
        made, *others = out if isinstance(out, tuple) else (out,)
        if made.untyped_storage().data_ptr() not in self._buffers:
            self._adopt(made)
        for other in others:
            self._kept.append(other)
            self._unreadable.add(other.untyped_storage().data_ptr())
        handler(made, *args, **kwargs)
        return out

    def _is_part_of_a_norm(self, function: Any, args: Sequence[Any]) -> bool:
        return function is aten.pow.Tensor_Scalar or any(map(self._norms.knows, args))

    def _follow_norm(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """A step of a norm that is written out by hand, or its last one."""
        out: Tensor = self._unseen(lambda: function(*args, **kwargs))
        if (whole := self._norms.complete(function, args)) is not None:
            x, eps = whole
            self._adopt(out)
            self._add(Normalize(self.operand(x), Norm("rms", eps), x.shape[-1], self.operand(out)))
        elif kwargs or not self._norms.follow(function, args, out):
            raise NotRecordable(f"it uses {function} on a part of a norm")
        else:
            self._kept.append(out)
            self._unreadable.add(out.untyped_storage().data_ptr())
        return out

    def _depends(self, args: Sequence[Any]) -> bool:
        """Whether any argument is made of tokens or positions; what is not is a constant."""
        flat = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,))]
        tensors = [x for x in flat if isinstance(x, Tensor)]
        addresses = {x.untyped_storage().data_ptr() for x in tensors}
        return not addresses.isdisjoint({*self._buffers, *self.indices, *self._unreadable})

    def _handler(self, function: Any, args: Sequence[Any]) -> Callable[..., None] | None:
        if function in _ARITHMETIC:
            return lambda out, a, b, alpha=1: self._combine(_ARITHMETIC[function], out, a, b, alpha)
        if function in _COPIES:
            return lambda out, x, **options: self._copy(out, x)
        if function in _ACTIVATIONS:
            return lambda out, x: self._activate(_ACTIVATIONS[function], out, x)
        if function is aten.gelu.default:
            return self._gelu
        if function is aten.native_layer_norm.default:
            return self._layer_norm
        if function is aten.embedding.default:
            return lambda out, table, index, *options: self._gather(out, table, index)
        if function is aten.index.Tensor and len(args[1]) == 1:
            return lambda out, table, indices: self._gather(out, table, indices[0])
        if function is aten.index_select.default:
            return self._index_select
        if function is aten.cat.default:
            return self._concatenate
        return None

    def _combine(self, kind: Arithmetic, out: Tensor, a: Tensor, b: Tensor | float, alpha: float) -> None:
        if alpha != 1:
            raise NotRecordable("it adds with a factor (alpha)")
        if not self._is_row(a) and isinstance(b, Tensor) and kind in ("add", "multiply"):
            a, b = b, a  # commutative to the last bit
        if _row_shape(a) != _row_shape(out):
            raise NotRecordable(f"it combines {list(a.shape)} with a larger tensor")
        self._add(Combine(kind, self.operand(a), self._second(b, out), self.operand(out)))

    def _second(self, b: Tensor | float, out: Tensor) -> Operand | Tensor | float:
        if not isinstance(b, Tensor):
            return float(b)
        if self._is_row(b):
            if _row_shape(b) != _row_shape(out):
                raise NotRecordable(f"it combines {list(out.shape)} with {list(b.shape)}")
            return self.operand(b)
        if b.numel() == 1:
            number: float = self._unseen(lambda: float(b))
            return number
        inner = _row_shape(out)[1:]
        if any(size != 1 for size in b.shape[: max(0, b.dim() - len(inner))]):
            raise NotRecordable("it combines rows with a constant that differs by row")
        constant: Tensor = self._unseen(
            lambda: b.float().broadcast_to(*b.shape[: -len(inner)], *inner).flatten().clone()
        )
        return constant

    def _copy(self, out: Tensor, x: Tensor) -> None:
        if out.dtype != torch.float32:
            raise NotRecordable(f"it makes a tensor of {out.dtype}")
        self._add(Copy(self.operand(x), self.operand(out)))

    def _activate(self, kind: Activation, out: Tensor, x: Tensor) -> None:
        """A function in place of a layer; the program calls the kernels', as it does for layers."""
        self._add(Activate(kind, self.operand(x), self.operand(out)))

    def _gelu(self, out: Tensor, x: Tensor, approximate: str = "none") -> None:
        self._activate("gelu_tanh" if approximate == "tanh" else "gelu", out, x)

    def _layer_norm(
        self, out: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> None:
        if len(shape) != 1:
            raise NotRecordable("it normalises over several dimensions")
        parameters = (None if each is None else each.detach().float().contiguous() for each in (weight, bias))
        self._add(Normalize(self.operand(x), Norm("layer", eps, *parameters), shape[0], self.operand(out)))

    def _gather(self, out: Tensor, table: Tensor, index: Tensor) -> None:
        name = self.indices.get(index.untyped_storage().data_ptr())
        if name is None or self._is_row(table):
            raise NotRecordable("it looks up rows by something else than tokens or positions")
        if table.dtype != torch.float32 or not table.is_contiguous():
            raise NotRecordable("it looks up rows of a table that is not float32 and contiguous")
        self._add(Gather(table.detach(), name, self.operand(out)))

    def _concatenate(self, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
        if dim not in (-1, out.dim() - 1) or len(_row_shape(out)) != 2:
            raise NotRecordable("it concatenates along another dimension than the last of [T, n]")
        whole, offset = self.operand(out), 0
        for part in parts:
            width = part.shape[-1]
            self._add(Copy(self.operand(part), dataclasses.replace(whole, offset=offset, width=width)))
            offset += width

    def _index_select(self, out: Tensor, table: Tensor, dim: int, index: Tensor) -> None:
        if dim != 0:
            raise NotRecordable("it selects along another dimension than the first")
        self._gather(out, table, index)

    # Operands

    def operand(self, x: Tensor) -> Operand:
        """Where the numbers of x [rows, …] lie. Raises NotRecordable where they are no run in every row."""
        buffer = self._buffers.get(x.untyped_storage().data_ptr())
        if buffer is None or x.dtype != torch.float32:
            raise NotRecordable(f"it computes with a tensor of {x.dtype} that is made of neither tokens nor positions")
        if self.program.phases[buffer] != self._phase:
            raise NotRecordable("logits uses what forward computed besides its result")
        width = self.program.widths[buffer]
        if x.is_contiguous() and x.numel() == self._rows * width:
            return Operand(buffer, 0, width)
        while x.dim() > 1 and x.shape[0] == 1:
            x = x[0]
        inner = x[0]
        if x.shape[0] != self._rows or x.stride(0) != width or not inner.is_contiguous():
            raise NotRecordable(f"it computes with a view {list(x.shape)} whose rows are not contiguous")
        return Operand(buffer, int(x.storage_offset()), inner.numel())

    def whole(self, x: Tensor) -> Operand:
        """The operand of x as a buffer of its own: copied where it is a part of a wider one."""
        operand = self.operand(x)
        return self._rowwise(x, operand.width)

    def _rowwise(self, x: Tensor, width: int) -> Operand:
        operand = self.operand(x)
        if operand.width != width:
            raise NotRecordable(f"a layer for {width} numbers gets {operand.width}")
        if operand.width == self.program.widths[operand.buffer]:
            return operand
        own = self.operand(self._new(self._rows, operand.width))
        self._add(Copy(operand, own))
        return own

    def _is_row(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._buffers

    def _new(self, *shape: int) -> Tensor:
        out: Tensor = self._unseen(lambda: torch.zeros(shape))
        self._adopt(out)
        return out

    def _adopt(self, x: Tensor) -> None:
        """A new buffer for the memory of x [rows, …]."""
        if x.untyped_storage().nbytes() % (4 * self._rows) != 0 or x.dtype != torch.float32:
            raise NotRecordable(f"it makes a tensor {list(x.shape)} of {x.dtype}, which has not {self._rows} rows")
        self._kept.append(x)
        width = x.untyped_storage().nbytes() // (4 * self._rows)
        self._buffers[x.untyped_storage().data_ptr()] = self.program.new_buffer(width, self._phase)

    def _unseen(self, make: Callable[[], Any]) -> Any:
        paused, self._paused = self._paused, True
        try:
            return make()
        finally:
            self._paused = paused

    def _add(self, instruction: Any) -> None:
        self.program.instructions.append(instruction)


class _RecordingAttend(Attend):
    """What stands behind `attend` while a program is recorded."""

    def __init__(self, recorder: _Recorder) -> None:
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


def _row_shape(x: Tensor) -> tuple[int, ...]:
    """The shape from the rows on: what runs as a batch of one sequence has ones before them."""
    shape = tuple(x.shape)
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _same(a: object, b: object) -> bool:
    """Whether two recordings, or parts of them, say the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))
    if isinstance(a, PackedLinear | Rotary):
        return a is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b
