"""Norms written out by hand, recognised while a program is recorded.

    x * rsqrt(mean(x ** 2) + eps)      the usual RMS norm; also x * x, and x / sqrt(…)

Each step of it is known by its result, whole and as it was made: a part of the squares, or another view of the factor,
makes another norm. The last step, a product with x, becomes the kernels' own norm; what was recorded on the way is left
out of the program where nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

aten = torch.ops.aten
Stage = Literal["square", "mean", "shifted", "root", "inverse root"]
_NEXT: dict[tuple[Any, Stage], Stage] = {
    (aten.mean.dim, "square"): "mean",
    (aten.add.Tensor, "mean"): "shifted",
    (aten.add_.Tensor, "mean"): "shifted",
    (aten.add.Scalar, "mean"): "shifted",
    (aten.add_.Scalar, "mean"): "shifted",
    (aten.sqrt.default, "shifted"): "root",
    (aten.rsqrt.default, "shifted"): "inverse root",
}
_LAST: dict[Any, Stage] = {aten.mul.Tensor: "inverse root", aten.div.Tensor: "root"}


@dataclass(frozen=True)
class Partial:
    """What some operators have made of x so far."""

    stage: Stage
    x: Tensor
    result: Tensor
    eps: float = 0.0


class RootMeanSquare:
    """Follows the steps."""

    def __init__(self) -> None:
        self._partials: dict[int, Partial] = {}
        """By the address of the result's memory."""

    def follow(self, function: Any, args: Sequence[Any], out: Tensor) -> None:
        """Note a step, and forget what was made of numbers that have changed."""
        partial = self._next(function, args, out)
        at = _address(out)
        if function._schema.is_mutable:
            self._partials = {key: value for key, value in self._partials.items() if at not in (key, _address(value.x))}
        if partial is not None:
            self._partials[at] = partial

    def complete(self, function: Any, args: Sequence[Any]) -> tuple[Tensor, float] | None:
        """x and eps where this product or quotient is the norm's last step."""
        if function not in _LAST or len(args) != 2:
            return None
        orders = [(args[0], args[1]), (args[1], args[0])] if function is aten.mul.Tensor else [(args[0], args[1])]
        for x, factor in orders:
            partial = self._made(factor)
            if partial and partial.stage == _LAST[function] and isinstance(x, Tensor) and _same_view(x, partial.x):
                return x, partial.eps
        return None

    def _made(self, x: object) -> Partial | None:
        """Of what x is the result, where it is one on the way."""
        partial = self._partials.get(_address(x)) if isinstance(x, Tensor) else None
        return partial if partial and isinstance(x, Tensor) and _same_view(x, partial.result) else None

    def _next(self, function: Any, args: Sequence[Any], out: Tensor) -> Partial | None:
        x = args[0]
        if function is aten.pow.Tensor_Scalar and args[1] == 2:
            return Partial("square", x, out)
        if function is aten.mul.Tensor and isinstance(args[1], Tensor) and _same_view(x, args[1]):
            return Partial("square", x, out)
        partial = self._made(x)
        if partial is None:
            return None
        stage = _NEXT.get((function, partial.stage))
        if stage is None or (stage == "mean" and not _over_the_last(x, args)):
            return None
        if stage == "shifted":
            return (
                None if isinstance(args[1], Tensor) else replace(partial, stage=stage, result=out, eps=float(args[1]))
            )
        return replace(partial, stage=stage, result=out)


def _over_the_last(x: Tensor, args: Sequence[Any]) -> bool:
    """mean(x, dim, keepdim): over the last dimension, which is kept."""
    return len(args) == 3 and list(args[1]) in ([-1], [x.dim() - 1]) and args[2] is True


def _same_view(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
