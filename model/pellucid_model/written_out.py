"""Attention that a module writes out: softmax(mask(q @ k.transpose(-2, -1) * scale)) @ v.

While an adopted module runs, the product of queries and keys is not multiplied out. `Scores` stands in its place and
notes what is done to it; where it meets the values, q, k and the scale are known and `attend` does the rest. What
changes scores in any other way is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pellucid_model.errors import ModelError

PRODUCTS = frozenset({torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__})
ROWS_LOOKED_AT = 8
"""Masks of more rows are not looked at: a few tokens are always tried at start."""


class Scores(Tensor):
    """[…, T, T] scores, or their softmax, of which nothing is computed. It has a shape and a type, and no numbers."""

    q: Tensor
    """[…, T, D]"""
    k: Tensor
    """[…, T, D]"""
    scale: float
    masks: tuple[Tensor, ...]
    """Applied so far: true, or 0, where a key is seen."""
    is_weights: bool
    """The softmax has been taken."""

    def __new__(
        cls, q: Tensor, k: Tensor, scale: float = 1.0, masks: tuple[Tensor, ...] = (), is_weights: bool = False
    ) -> Scores:
        shape = (*q.shape[:-1], k.shape[-2])
        scores: Scores = Tensor._make_wrapper_subclass(cls, shape, dtype=q.dtype, device=q.device)
        scores.q, scores.k, scores.scale, scores.masks, scores.is_weights = q, k, scale, masks, is_weights
        return scores

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]  # torch's stub is wrong
        raise _refusal(func)

    def scaled(self, factor: float) -> Scores:
        return Scores(self.q, self.k, self.scale * factor, self.masks)

    def masked(self, seen: Tensor) -> Scores:
        return Scores(self.q, self.k, self.scale, (*self.masks, seen))

    def weights(self) -> Scores:
        return Scores(self.q, self.k, self.scale, self.masks, is_weights=True)

    def become(self, other: Scores) -> Scores:
        """Itself, changed in place."""
        self.scale, self.masks, self.is_weights = other.scale, other.masks, other.is_weights
        return self

    def normalised(self) -> Scores:
        """Itself, once its softmax has been taken."""
        if not self.is_weights:
            raise ModelError("attention is written out in a way that is not known: no softmax before the values")
        return self

    def mask_is_causal(self, rows: int) -> bool:
        """Whether one of the masks hides the future, and nothing else."""
        return any(looks_causal(mask, rows) for mask in self.masks)


def is_product_with_keys(a: Any, b: Any, *_: Any, rows: int) -> bool:
    """Whether a @ b is […, T, D] times […, D, T], both of them activations of heads."""
    if isinstance(a, Scores) or not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return a.dim() == b.dim() >= 3 and (a.shape[-2], b.shape[-1]) == (rows, rows)


def einsum_product(equation: str, a: Tensor, b: Tensor, rows: int) -> Scores | None:
    """What an einsum of queries and keys stands for, as "bhid,bhjd->bhij"; None where it is something else."""
    (left, right), out = _letters(equation)
    shared, query, key = out[:-2], *out[-2:]
    inner = [letter for letter in left if letter not in out]
    if len(inner) != 1 or {*left} != {*shared, query, *inner} or {*right} != {*shared, key, *inner}:
        return None
    q, k = (
        _ordered(x, x_letters, (*shared, last, *inner)) for x, x_letters, last in ((a, left, query), (b, right, key))
    )
    return Scores(q, k) if (q.shape[-2], k.shape[-2]) == (rows, rows) and q.dim() >= 3 else None


def einsum_values(equation: str, v: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """For weights times values, as "bhij,bhjd->bhid": v as […, T, D], and what makes […, T, D] the einsum's result."""
    (left, right), out = _letters(equation)
    shared, query, key = left[:-2], *left[-2:]
    width = [letter for letter in right if letter not in left]
    if len(width) != 1 or {*right} != {*shared, key, *width} or {*out} != {*shared, query, *width}:
        raise _refusal(torch.einsum)
    return _ordered(v, right, (*shared, key, *width)), lambda mixed: _ordered(mixed, (*shared, query, *width), out)


def _letters(equation: str) -> tuple[list[list[str]], list[str]]:
    """ "bhid, bhjd -> bhij": the letters of what is given, and of what comes out."""
    given, _, out = equation.replace(" ", "").partition("->")
    return [list(one) for one in given.split(",")], list(out)


def _ordered(x: Tensor, letters: Sequence[str], wanted: Sequence[str]) -> Tensor:
    return x.permute([list(letters).index(letter) for letter in wanted])


def scores_after(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What becomes of scores under one of torch's functions."""
    name = getattr(func, "__name__", str(func)).strip("_")
    if name in _LOOKS:
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
    change = _CHANGES.get(name)
    if change is None:
        raise _refusal(func)
    changed = change(*args, **kwargs)
    if func.__name__.endswith("_") and not func.__name__.endswith("__"):  # in place, as masked_fill_
        if not isinstance(args[0], Scores):
            raise _refusal(func)
        return args[0].become(changed)
    return changed


def looks_causal(mask: Tensor, rows: int) -> bool:
    """mask [..., T, T], bool (true: seen) or added to the scores. One of many rows is believed."""
    if rows > ROWS_LOOKED_AT:
        return True
    if mask.dim() < 2 or mask.shape[-2:] != (rows, rows):
        return False
    hidden = ~mask if mask.dtype == torch.bool else mask < -1e4
    return bool((hidden == torch.ones(rows, rows, dtype=torch.bool, device=mask.device).triu(1)).all())


def _refusal(func: Any) -> ModelError:
    name = getattr(func, "__name__", str(func)).strip("_")
    return ModelError(
        f"attention is written out in a way that is not known: {name} of its scores; known are a scale, masks, softmax "
        "and dropout; call F.scaled_dot_product_attention instead, or follow the contract"
    )


def _scale(a: Any, b: Any) -> Scores:
    scores, factor = (a, b) if isinstance(a, Scores) else (b, a)
    return _unweighted(scores, "mul").scaled(float(factor))


def _divide(scores: Any, divisor: Any) -> Scores:
    return _unweighted(scores, "div").scaled(1.0 / float(divisor))


def _fill(scores: Any, hidden: Tensor, value: float) -> Scores:
    if not float(value) < -1e3:
        raise _refusal(Tensor.masked_fill)
    return _unweighted(scores, "masked_fill").masked(~hidden)


def _where(seen: Tensor, scores: Any, _: Any) -> Scores:
    return _unweighted(scores, "where").masked(seen)


def _add(a: Any, b: Any) -> Scores:
    scores, mask = (a, b) if isinstance(a, Scores) else (b, a)
    if not isinstance(mask, Tensor) or not bool(((mask == 0) | (mask < -1e3)).all()):
        raise _refusal(torch.add)
    return _unweighted(scores, "add").masked(mask)


def _softmax(scores: Any, dim: int = -1, **_: Any) -> Scores:
    if dim not in (-1, scores.dim() - 1):
        raise ModelError(f"attention takes its softmax over dimension {dim}; accepted: the last one")
    return _unweighted(scores, "softmax").weights()


def _same(scores: Any, *_: Any, **__: Any) -> Any:
    return scores


def _unweighted(scores: Any, name: str) -> Scores:
    if not isinstance(scores, Scores) or scores.is_weights:
        raise ModelError(f"attention is written out in a way that is not known: {name} after its softmax")
    return scores


_LOOKS = frozenset({"get", "size", "dim", "numel", "is_floating_point"})
_CHANGES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "rmul", "imul", "multiply"), _scale),
    **dict.fromkeys(("div", "truediv", "itruediv", "divide"), _divide),
    **dict.fromkeys(("add", "radd", "iadd"), _add),
    "masked_fill": _fill,
    "where": _where,
    "softmax": _softmax,
    **dict.fromkeys(("dropout", "contiguous", "float", "to", "type_as", "type", "detach"), _same),
}
