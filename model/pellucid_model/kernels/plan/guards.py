"""What a recording is held against: no number of a row goes into Python unseen, and another recording says the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pellucid_model.contract import Rotary
from pellucid_model.kernels.interface import PackedLinear

_TAKES_NUMBERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
"""Without torch's dispatcher seeing it."""


class NumbersStay(TorchFunctionMode):
    """Asks before a tensor's numbers are handed to Python; `check` raises NotRecordable where they are a row's."""

    def __init__(self, check: Callable[[Tensor], object]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _TAKES_NUMBERS:
            self._check(args[0])
        return function(*args, **(kwargs or {}))


def same(a: object, b: object) -> bool:
    """Whether two recordings, or parts of them, say the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))
    if isinstance(a, PackedLinear | Rotary):
        return a is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b
