"""What reductions between layers become: sums, means, variances, norms and softmax over dimensions within a row.

They are computed in the order in which they are written here, so their last bits need not be torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pellucid_model.kernels.fused import Norm
from pellucid_model.kernels.plan.program import Activate, Combine, Normalize, Operand, Rearrange, Reduce, Reduction
from pellucid_model.kernels.plan.rows import NotRecordable
from pellucid_model.kernels.plan.tape import Tape


def _last(tape: Tape, x: Tensor, dim: Any) -> tuple[Tensor, int]:
    """A view of x in which the dimensions that are reduced come last, and how many numbers they hold."""
    if dim is None or dim == [] or dim == ():
        raise NotRecordable("it reduces over the rows")
    dims = sorted({each % x.dim() for each in (dim if isinstance(dim, list | tuple) else [dim])})
    if tape.row_dimension(x) in dims and x.shape[tape.row_dimension(x)] == tape.rows:
        raise NotRecordable("it reduces over the rows")
    view: Tensor = tape.unseen(lambda: x.movedim(dims, list(range(-len(dims), 0))))
    return view, math.prod(x.shape[each] for each in dims)


def reduce(kind: Reduction, tape: Tape, out: Tensor, x: Tensor, dim: Any = None, *_: Any, **options: Any) -> None:
    view, size = _last(tape, x, dim)
    tape.add(Reduce(kind, tape.operand(view), size, tape.target(out)))


def mean(tape: Tape, out: Tensor, x: Tensor, dim: Any = None, *_: Any, **options: Any) -> None:
    reduce("sum", tape, out, x, dim)
    tape.add(Combine("divide", tape.target(out), float(_last(tape, x, dim)[1]), tape.target(out)))


def variance(tape: Tape, out: Tensor, x: Tensor, dim: Any = None, **options: Any) -> None:
    view, size = _last(tape, x, dim)
    correction = options.get("correction")
    degrees = size - (1 if correction is None else correction)
    numbers, target = tape.operand(view), tape.target(out)
    mean, distance = tape.buffer(target.width), tape.buffer(numbers.width)
    tape.add(Reduce("sum", numbers, size, mean))
    tape.add(Combine("divide", mean, float(size), mean))
    tape.add(Combine("subtract", numbers, _repeated(tape, mean, size), distance))
    tape.add(Combine("multiply", distance, distance, distance))
    tape.add(Reduce("sum", distance, size, target))
    tape.add(Combine("divide", target, float(degrees), target))


def deviation(tape: Tape, out: Tensor, x: Tensor, dim: Any = None, **options: Any) -> None:
    variance(tape, out, x, dim, **options)
    tape.add(Activate("sqrt", tape.target(out), tape.target(out)))


def vector_norm(tape: Tape, out: Tensor, x: Tensor, order: float = 2, dim: Any = None, *_: Any) -> None:
    view, size = _last(tape, x, dim)
    if order != 2:
        raise NotRecordable(f"it takes a norm of order {order}; recorded is 2")
    numbers, target = tape.operand(view), tape.target(out)
    squares = tape.buffer(numbers.width)
    tape.add(Combine("multiply", numbers, numbers, squares))
    tape.add(Reduce("sum", squares, size, target))
    tape.add(Activate("sqrt", target, target))


def softmax(tape: Tape, out: Tensor, x: Tensor, dim: int, _: bool = False) -> None:
    view, size = _last(tape, x, dim)
    if dim % x.dim() != x.dim() - 1:
        raise NotRecordable("it takes a softmax over another dimension than the last")
    numbers, target = tape.operand(view), tape.target(out)
    per_group = tape.buffer(numbers.width // size)
    tape.add(Reduce("maximum", numbers, size, per_group))
    tape.add(Combine("subtract", numbers, _repeated(tape, per_group, size), target))
    tape.add(Activate("exp", target, target))
    total = tape.buffer(numbers.width // size)
    tape.add(Reduce("sum", target, size, total))
    tape.add(Combine("divide", target, _repeated(tape, total, size), target))


def _repeated(tape: Tape, x: Operand, times: int) -> Operand:
    """Each number of x so many times, one after the other."""
    out = tape.buffer(x.width * times)
    tape.add(Rearrange(x, torch.arange(x.width, dtype=torch.int32).repeat_interleave(times), 0.0, out))
    return out


def layer_norm(
    tape: Tape, out: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    if len(shape) != 1:
        raise NotRecordable("it normalises over several dimensions")
    parameters = (
        None if each is None else tape.constant(each).detach().float().contiguous() for each in (weight, bias)
    )
    tape.add(Normalize(tape.operand(x), Norm("layer", eps, *parameters), shape[0], tape.target(out)))
