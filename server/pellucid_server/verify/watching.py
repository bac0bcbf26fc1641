"""What passes through a model's parts in one run, and the first of them in which two runs part.

Watched are the input and output of every submodule, by name, and queries, keys, values and output of every attention
that goes through `attend`. Two models are compared where names agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from pellucid_model.contract import Attend, AttentionOptions, DecoderModel, Rotary
from pellucid_model.gathered import Gathered
from pellucid_model.user_module import without_wrappers


@dataclass
class Trace:
    """Tensors by label, in the order in which they came; of a label that comes again, the last."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def note(self, label: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) and value else value
        # Not what stands for numbers that are never computed, as in an adopted module.
        if type(value) in (Tensor, nn.Parameter) and value.is_floating_point() and value.dim() >= 2:
            self.tensors.pop(label, None)
            self.tensors[label] = value.detach().to(device="cpu", dtype=torch.float64)


@dataclass(frozen=True)
class Parting:
    """The first label in which two traces differ."""

    label: str
    difference: float
    """Largest, relative to the largest number there."""
    heads: tuple[int, ...]
    """The attention heads that differ; empty where it is not made of heads."""
    all_heads: int
    last_equal: str
    """The label before it; "" where there is none."""

    def text(self) -> str:
        heads = ""
        if 0 < len(self.heads) < self.all_heads:
            heads = f", head{'s' if len(self.heads) > 1 else ''} {', '.join(map(str, self.heads))} of {self.all_heads}"
        equal = f"; equal up to the {self.last_equal}" if self.last_equal else ""
        return f"first differs in the {self.label}{heads} ({self.difference:.1e} of the largest number there){equal}"


class WatchedAttend(Attend):
    """Passes everything on, and notes it."""

    def __init__(self, inner: Attend, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        for name, part in (("queries", q), ("keys", k), ("values", v)):
            self._trace.note(f"{name} of layer {layer}", part)
        out = self._inner.attend(layer, q, k, v, options, kv_from)
        self._trace.note(f"attention output of layer {layer}", out)
        return out

    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        for name, part in (("keys", k), ("values", v)):
            self._trace.note(f"{name} of layer {layer}", part)
        return self._inner.gathered(layer, k, v, rotary=rotary, window=window)


class WatchedModel:
    """A model whose `attend` is watched."""

    def __init__(self, model: DecoderModel, trace: Trace) -> None:
        self.position_scheme = model.position_scheme if hasattr(model, "position_scheme") else "absolute"
        self._model, self._trace = model, trace

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        with watched_modules(cast("nn.Module", self._model), self._trace):
            return self._model.forward(tokens, positions, WatchedAttend(attend, self._trace))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


@contextmanager
def watched_modules(module: nn.Module, trace: Trace) -> Iterator[None]:
    """Notes what every submodule is given and returns."""
    hooks = []
    for name, part in module.named_modules():
        if not name:
            continue
        bare = without_wrappers(name)

        def before(_: nn.Module, given: Any, bare: str = bare) -> None:
            trace.note(f"input of {bare}", given)

        def after(_: nn.Module, given: Any, out: Any, bare: str = bare) -> None:
            trace.note(f"output of {bare}", out)

        hooks += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def first_parting(served: Trace, own: Trace, length: int, limit: float) -> Parting | None:
    """Where the last rows of the two first differ by more than `limit`; `own` has `length` rows.

    None where they agree in all that has the same name in both.
    """
    heads, last = _heads(served), ""
    rows = next((len(tensor) for label, tensor in served.tensors.items() if label.startswith("keys of")), 1)
    for label, tensor in served.tensors.items():
        a, b = _last_row(tensor, rows), _last_row(own.tensors.get(label), length)
        if a is None or b is None or a.numel() != b.numel():
            continue
        apart, scale = (a.reshape(b.shape) - b).abs(), float(b.abs().max())
        if not float(apart.max()) <= limit * scale:
            count = b.shape[0] if b.dim() == 2 else next((h for h, d in heads if h * d == b.numel()), 1)
            differing = ~(apart.reshape(count, -1).amax(dim=1) <= limit * scale)
            relative = float(apart.max()) / scale if scale else float("inf")
            return Parting(label, relative, tuple(differing.nonzero().flatten().tolist()), count, last)
        last = label
    return None


def _heads(trace: Trace) -> list[tuple[int, int]]:
    """(heads, head_dim) of every attention."""
    outputs = [tensor for label, tensor in trace.tensors.items() if label.startswith("attention output")]
    return [(tensor.shape[-2], tensor.shape[-1]) for tensor in outputs]


def _last_row(tensor: Tensor | None, rows: int) -> Tensor | None:
    """[d] of [T, d], [H, D] of [T, H, D] or [H, T, D], any in a batch of one; None where no dimension counts rows."""
    if tensor is None:
        return None
    while tensor.dim() > 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.shape[0] == rows:
        return tensor[-1]
    if tensor.dim() == 3 and tensor.shape[1] == rows:
        return tensor[:, -1]
    return tensor if rows == 1 else None
