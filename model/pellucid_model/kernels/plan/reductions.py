"""What reductions between layers become: sums, means, variances, norms and softmax over dimensions within a row.

They are computed in the order in which they are written here, so their last bits need not be torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid_model.kernels.fused import Norm
from pellucid_model.kernels.plan.program import Activate, Combine, Normalize, Operand, Rearrange, Reduce, Reduction
from pellucid_model.kernels.plan.rows import NotRecordable

if TYPE_CHECKING:
    from pellucid_model.kernels.plan.recording import Recorder


def _last(r: Recorder, x: Tensor, dim: Any) -> tuple[Tensor, int]:
    """A view of x in which the dimensions that are reduced come last, and how many numbers they hold."""
    if dim is None or dim == [] or dim == ():
        raise NotRecordable("it reduces over the rows")
    dims = sorted({each % x.dim() for each in (dim if isinstance(dim, list | tuple) else [dim])})
    if r.row_dimension(x) in dims and x.shape[r.row_dimension(x)] == r.rows:
        raise NotRecordable("it reduces over the rows")
    view: Tensor = r.unseen(lambda: x.movedim(dims, list(range(-len(dims), 0))))
    return view, math.prod(x.shape[each] for each in dims)


def reduce(kind: Reduction, r: Recorder, out: Tensor, x: Tensor, dim: Any = None, *_: Any, **options: Any) -> None:
    view, size = _last(r, x, dim)
    r.add(Reduce(kind, r.operand(view), size, r.target(out)))


def mean(r: Recorder, out: Tensor, x: Tensor, dim: Any = None, *_: Any, **options: Any) -> None:
    reduce("sum", r, out, x, dim)
    r.add(Combine("divide", r.target(out), float(_last(r, x, dim)[1]), r.target(out)))


def variance(r: Recorder, out: Tensor, x: Tensor, dim: Any = None, **options: Any) -> None:
    view, size = _last(r, x, dim)
    correction = options.get("correction")
    degrees = size - (1 if correction is None else correction)
    numbers, target = r.operand(view), r.target(out)
    mean, distance = r.buffer(target.width), r.buffer(numbers.width)
    r.add(Reduce("sum", numbers, size, mean))
    r.add(Combine("divide", mean, float(size), mean))
    r.add(Combine("subtract", numbers, _repeated(r, mean, size), distance))
    r.add(Combine("multiply", distance, distance, distance))
    r.add(Reduce("sum", distance, size, target))
    r.add(Combine("divide", target, float(degrees), target))


def deviation(r: Recorder, out: Tensor, x: Tensor, dim: Any = None, **options: Any) -> None:
    variance(r, out, x, dim, **options)
    r.add(Activate("sqrt", r.target(out), r.target(out)))


def vector_norm(r: Recorder, out: Tensor, x: Tensor, order: float = 2, dim: Any = None, *_: Any) -> None:
    view, size = _last(r, x, dim)
    if order != 2:
        raise NotRecordable(f"it takes a norm of order {order}; recorded is 2")
    numbers, target = r.operand(view), r.target(out)
    squares = r.buffer(numbers.width)
    r.add(Combine("multiply", numbers, numbers, squares))
    r.add(Reduce("sum", squares, size, target))
    r.add(Activate("sqrt", target, target))


def softmax(r: Recorder, out: Tensor, x: Tensor, dim: int, _: bool = False) -> None:
    view, size = _last(r, x, dim)
    if dim % x.dim() != x.dim() - 1:
        raise NotRecordable("it takes a softmax over another dimension than the last")
    numbers, target = r.operand(view), r.target(out)
    per_group = r.buffer(numbers.width // size)
    r.add(Reduce("maximum", numbers, size, per_group))
    r.add(Combine("subtract", numbers, _repeated(r, per_group, size), target))
    r.add(Activate("exp", target, target))
    total = r.buffer(numbers.width // size)
    r.add(Reduce("sum", target, size, total))
    r.add(Combine("divide", target, _repeated(r, total, size), target))


def _repeated(r: Recorder, x: Operand, times: int) -> Operand:
    """Each number of x so many times, one after the other."""
    out = r.buffer(x.width * times)
    r.add(Rearrange(x, torch.arange(x.width, dtype=torch.int32).repeat_interleave(times), 0.0, out))
    return out


def layer_norm(
    r: Recorder, out: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    if len(shape) != 1:
        raise NotRecordable("it normalises over several dimensions")
    parameters = (None if each is None else r.constant(each).detach().float().contiguous() for each in (weight, bias))
    r.add(Normalize(r.operand(x), Norm("layer", eps, *parameters), shape[0], r.target(out)))
