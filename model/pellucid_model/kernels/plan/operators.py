"""What torch's operators between layers become: instructions of a program, one operator at a time.

    arithmetic     sums, products, quotients, limits; a smaller operand is spread over the larger one
    functions      of single numbers; those that kernels have too become the kernels' own
    reductions     in reductions.py
    movements      and look-ups by tokens and positions, in movements.py

What is written in terms of others here is computed in that order, so its last bits need not be torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pellucid_model.kernels.interface import Function
from pellucid_model.kernels.plan.movements import (
    assign,
    copy,
    embedding,
    fill,
    index,
    index_select,
    join,
    masked_fill,
    movement,
    pad,
    where,
)
from pellucid_model.kernels.plan.program import Activate, Arithmetic, Combine, Operand
from pellucid_model.kernels.plan.reductions import (
    deviation,
    layer_norm,
    mean,
    reduce,
    softmax,
    variance,
    vector_norm,
)
from pellucid_model.kernels.plan.rows import NotRecordable
from pellucid_model.kernels.plan.tape import Tape

aten = torch.ops.aten
Handler = Callable[..., None]
"""Takes the tape, the operator's result and its arguments."""


def handler_of(function: Any) -> Handler | None:
    return _HANDLERS.get(function)


# Arithmetic


def _arithmetic(kind: Arithmetic) -> Handler:
    def handler(tape: Tape, out: Tensor, a: Any, b: Any, alpha: float = 1) -> None:
        if alpha != 1:
            raise NotRecordable("it adds with a factor (alpha)")
        if tape.is_row(a):
            _combine(tape, kind, out, a, b)
        elif kind in ("add", "multiply"):  # commutative to the last bit
            _combine(tape, kind, out, b, a)
        else:
            _combine_reversed(tape, kind, out, a, b)

    return handler


def _combine_reversed(tape: Tape, kind: Arithmetic, out: Tensor, a: Any, b: Tensor) -> None:
    """A constant less, or divided by, numbers of each row: a - b = -b + a, to the last bit; a / b = 1 / b · a."""
    target = tape.target(out)
    turned = tape.buffer(target.width)
    if kind == "subtract":
        tape.add(Combine("multiply", tape.operand_as(b, out), -1.0, turned))
    else:
        tape.add(Activate("reciprocal", tape.operand_as(b, out), turned))
    tape.add(Combine("add" if kind == "subtract" else "multiply", turned, _second(tape, a, out), target))


def _combine(tape: Tape, kind: Arithmetic, out: Tensor, a: Tensor, b: Any) -> None:
    tape.add(Combine(kind, tape.operand_as(a, out), _second(tape, b, out), tape.target(out)))


def _second(tape: Tape, b: Any, out: Tensor) -> Operand | Tensor | float:
    """A second operand as `Combine` takes it: numbers of each row, the same numbers for all rows, or one number."""
    if not isinstance(b, Tensor):
        return float(b)
    if tape.is_row(b):
        return tape.operand_as(b, out)
    tape.constant(b)
    if b.numel() == 1:
        number: float = tape.unseen(lambda: float(b))
        return number

    def spread() -> Tensor:
        by_row = b.float().expand(out.shape).movedim(tape.row_dimension(out), 0).reshape(tape.rows, -1)
        if not torch.equal(by_row, by_row[:1].expand_as(by_row)):
            raise NotRecordable("it combines rows with a constant that differs by row")
        return by_row[0].clone()

    if b.shape[max(0, b.dim() - out.dim() + tape.row_dimension(out)) :][:1] == (tape.rows,) and b.dim() == out.dim():
        raise NotRecordable("it combines rows with a constant of as many rows")
    constant: Tensor = tape.unseen(spread)
    return constant


def _reversed_subtract(tape: Tape, out: Tensor, x: Tensor, other: Any, alpha: float = 1) -> None:
    _arithmetic("subtract")(tape, out, other, x, alpha)


def _negative(tape: Tape, out: Tensor, x: Tensor) -> None:
    _combine(tape, "multiply", out, x, -1.0)


def _clamp(tape: Tape, out: Tensor, x: Tensor, least: Any = None, most: Any = None) -> None:
    target = tape.target(out)
    source = tape.operand_as(x, out)
    for kind, limit in (("maximum", least), ("minimum", most)):
        if limit is not None:
            if tape.is_row(limit):
                raise NotRecordable("it limits numbers by others of the same row")
            tape.add(Combine(kind, source, _second(tape, limit, out), target))  # type: ignore[arg-type]
            source = target


def _hard_tanh(tape: Tape, out: Tensor, x: Tensor, least: float = -1, most: float = 1) -> None:
    _clamp(tape, out, x, least, most)


def _power(tape: Tape, out: Tensor, x: Tensor, exponent: float) -> None:
    source, target = tape.operand(x), tape.target(out)
    match exponent:
        case 2 | 3:
            square = tape.buffer(source.width) if exponent == 3 else target
            tape.add(Combine("multiply", source, source, square))
            if exponent == 3:
                tape.add(Combine("multiply", square, source, target))
        case 0.5:
            tape.add(Activate("sqrt", source, target))
        case -0.5:
            _inverse_root(tape, out, x)
        case -1:
            tape.add(Activate("reciprocal", source, target))
        case _:
            raise NotRecordable(f"it raises to the power of {exponent}; recorded are 2, 3, 0.5, -0.5 and -1")


# Functions


def _function(kind: Function) -> Handler:
    def handler(tape: Tape, out: Tensor, x: Tensor) -> None:
        tape.add(Activate(kind, tape.operand(x), tape.target(out)))

    return handler


def _gelu(tape: Tape, out: Tensor, x: Tensor, approximate: str = "none") -> None:
    _function("gelu_tanh" if approximate == "tanh" else "gelu")(tape, out, x)


def _inverse_root(tape: Tape, out: Tensor, x: Tensor) -> None:
    target = tape.target(out)
    root = tape.buffer(target.width)
    tape.add(Activate("sqrt", tape.operand(x), root))
    tape.add(Activate("reciprocal", root, target))


def _glu(tape: Tape, out: Tensor, x: Tensor, dim: int = -1) -> None:
    """a · sigmoid(b) of two halves."""
    first, second = tape.unseen(lambda: x.chunk(2, dim))
    gate = tape.buffer(tape.target(out).width)
    tape.add(Activate("sigmoid", tape.operand(second), gate))
    tape.add(Combine("multiply", tape.operand(first), gate, tape.target(out)))


_KINDS: dict[Arithmetic, tuple[str, ...]] = {
    "add": ("add.Tensor", "add_.Tensor", "add.Scalar", "add_.Scalar"),
    "subtract": ("sub.Tensor", "sub_.Tensor", "sub.Scalar", "sub_.Scalar"),
    "multiply": ("mul.Tensor", "mul_.Tensor", "mul.Scalar", "mul_.Scalar"),
    "divide": ("div.Tensor", "div_.Tensor", "div.Scalar", "div_.Scalar"),
}
_FUNCTIONS: dict[Function, tuple[str, ...]] = {
    "relu": ("relu.default", "relu_.default"),
    "silu": ("silu.default", "silu_.default"),
    "tanh": ("tanh.default", "tanh_.default"),
    "sigmoid": ("sigmoid.default", "sigmoid_.default"),
    "exp": ("exp.default", "exp_.default"),
    "sqrt": ("sqrt.default", "sqrt_.default"),
    "absolute": ("abs.default", "abs_.default"),
    "reciprocal": ("reciprocal.default", "reciprocal_.default"),
}
_OTHERS: dict[str, Handler] = {
    **dict.fromkeys(("rsub.Scalar", "rsub.Tensor"), _reversed_subtract),
    **dict.fromkeys(("neg.default", "neg_.default"), _negative),
    **dict.fromkeys(("clamp.default", "clamp_.default", "clamp.Tensor", "clamp_.Tensor"), _clamp),
    **dict.fromkeys(("clamp_min.default", "clamp_min_.default"), _clamp),
    "clamp_max.default": lambda tape, out, x, most: _clamp(tape, out, x, None, most),
    "clamp_max_.default": lambda tape, out, x, most: _clamp(tape, out, x, None, most),
    **dict.fromkeys(("hardtanh.default", "hardtanh_.default"), _hard_tanh),
    **dict.fromkeys(("pow.Tensor_Scalar", "pow_.Scalar"), _power),
    **dict.fromkeys(("gelu.default", "gelu_.default"), _gelu),
    **dict.fromkeys(("rsqrt.default", "rsqrt_.default"), _inverse_root),
    "glu.default": _glu,
    "sum.dim_IntList": partial(reduce, "sum"),
    "amax.default": partial(reduce, "maximum"),
    "mean.dim": mean,
    "var.correction": variance,
    "std.correction": deviation,
    "linalg_vector_norm.default": vector_norm,
    "_softmax.default": softmax,
    "native_layer_norm.default": layer_norm,
    **dict.fromkeys(("clone.default", "_to_copy.default"), copy),
    **{f"{each}.default": partial(join, function=getattr(aten, each).default) for each in ("cat", "stack")},
    **{f"{each}.default": movement(getattr(aten, each).default) for each in ("repeat", "flip", "roll")},
    "constant_pad_nd.default": pad,
    **dict.fromkeys(("masked_fill.Scalar", "masked_fill.Tensor"), masked_fill),
    "where.self": where,
    "copy_.default": assign,
    **dict.fromkeys(("fill_.Scalar", "fill_.Tensor"), fill),
    "embedding.default": embedding,
    "index.Tensor": index,
    "index_select.default": index_select,
}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload)


_HANDLERS: dict[Any, Handler] = {
    _operator(name): handler
    for names, handler in (
        *((names, _arithmetic(kind)) for kind, names in _KINDS.items()),
        *((names, _function(kind)) for kind, names in _FUNCTIONS.items()),
        *(((name,), handler) for name, handler in _OTHERS.items()),
    )
    for name in names
}
