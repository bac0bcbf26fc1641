"""What a module asks of `attend`, layer by layer, found out by one forward of a single token. Nothing is declared.

In: any module of the contract. Out: one LayerCall per layer, or a ModelError that names the layer and what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid_model.contract import Attend, AttentionOptions, DecoderModel, Rotary
from pellucid_model.errors import ModelError
from pellucid_model.gathered import Gathered, Rows, gather

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What attention computes in while it is served."""


@dataclass(frozen=True)
class LayerCall:
    """One layer's attention."""

    kv_heads: int
    head_dim: int
    window: int | None
    """The layer's own; None: it sees everything."""
    kv_from: int | None = None
    """The layer whose keys and values it reads; None: it has its own."""
    gathered: bool = False
    """It takes the whole score matrix into its own hands."""
    positions: frozenset[str] = frozenset()
    """How it tells attend of positions: of "rotary", "alibi" and "distance"."""


@torch.no_grad()
def record_calls(model: DecoderModel, device: torch.device | None = None) -> list[LayerCall]:
    """The calls of layers 0, 1, 2, …, as one forward of the token 0 makes them."""
    recorder = Recorder()
    token = torch.zeros(1, dtype=torch.int64, device=device)
    model.forward(token, token, recorder)
    layers = sorted(recorder.calls)
    if not layers:
        raise ModelError("forward never attends: it makes no call of attend, and no attention of a known form is in it")
    if layers != list(range(len(layers))):
        raise ModelError(f"the model calls attend for layers {layers}; they must be numbered 0, 1, 2, … without gaps")
    return [recorder.calls[layer] for layer in layers]


class Recorder(Attend):
    """An `attend` over single tokens that attends to nothing and notes what it is asked."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        if kv_from is not None and not (
            kv_from < layer and kv_from in self.calls and self.calls[kv_from].kv_from is None
        ):
            raise ModelError(f"layer {layer}: kv_from = {kv_from}, but no earlier layer {kv_from} has keys of its own")
        source = None if kv_from is None else self.calls[kv_from]
        kv_heads, head_dim = (q.shape[1], q.shape[-1]) if source is None else (source.kv_heads, source.head_dim)
        if k is not None and v is not None:
            kv_heads = _check_keys(layer, k, v)
        if q.dim() != 3 or q.shape[-1] != (head_dim if k is None else k.shape[-1]) or q.shape[1] % kv_heads:
            raise ModelError(
                f"layer {layer} attends with q {list(q.shape)} to {kv_heads} kv heads of {head_dim}: q must be "
                "[T, Hq, D], with the keys' head_dim and a multiple of their heads"
            )
        if k is not None and (q.shape[0] != k.shape[0] or q.dtype != k.dtype):
            raise ModelError(
                f"layer {layer}: q is {list(q.shape)} of {q.dtype} and k {list(k.shape)} of {k.dtype}; "
                "rows and types must agree"
            )
        _check_type(layer, q)
        _check_options(layer, q, options)
        given = {"rotary": options.rotary, "alibi": options.alibi_slopes, "distance": options.distance_bias}
        positions = frozenset(name for name, value in given.items() if value is not None)
        self._note(layer, LayerCall(kv_heads, head_dim, options.window, kv_from, positions=positions))
        return torch.zeros_like(q)

    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        _check_keys(layer, k, v)
        _check_type(layer, k)
        _check_window(layer, window)
        positions = frozenset() if rotary is None else frozenset({"rotary"})
        self._note(layer, LayerCall(k.shape[1], k.shape[2], window, gathered=True, positions=positions))
        zero = torch.zeros(len(k), dtype=torch.int64, device=k.device)
        return gather(k[None], v[None], zero[None], Rows.of(zero, zero, 1), rotary=rotary, window=window)

    def _note(self, layer: int, call: LayerCall) -> None:
        if type(layer) is not int:
            raise ModelError(f"attend is called with layer = {layer!r}; accepted: 0, 1, 2, …, once each")
        if layer in self.calls:
            raise ModelError(f"the model calls attend twice for layer {layer}; each layer has a cache of its own")
        self.calls[layer] = call


def _check_keys(layer: int, k: Tensor, v: Tensor) -> int:
    """-> kv heads"""
    if k.dim() != 3 or k.shape != v.shape or k.dtype != v.dtype or 0 in k.shape[1:]:
        raise ModelError(
            f"layer {layer} attends with k {list(k.shape)} of {k.dtype} and v {list(v.shape)} of {v.dtype}: "
            "both must be [T, Hkv, D], of the same type"
        )
    return k.shape[1]


def _check_type(layer: int, x: Tensor) -> None:
    if x.dtype not in TYPES:
        raise ModelError(f"layer {layer} attends in {x.dtype}; accepted: {', '.join(map(str, TYPES))}")


def _check_options(layer: int, q: Tensor, options: AttentionOptions) -> None:
    heads, dim = q.shape[1:]
    slopes, table, rotary = options.alibi_slopes, options.distance_bias, options.rotary
    if slopes is not None and slopes.shape != (heads,):
        raise ModelError(f"layer {layer}: alibi_slopes is {list(slopes.shape)}; accepted: [{heads}], one per head")
    if table is not None and (table.dim() != 2 or table.shape[0] != heads or table.shape[1] == 0):
        raise ModelError(f"layer {layer}: distance_bias is {list(table.shape)}; accepted: [{heads}, B] with B >= 1")
    if rotary is not None and not (rotary.dim <= dim and rotary.inv_freq.shape == (rotary.dim // 2,)):
        raise ModelError(
            f"layer {layer}: rotary has dim = {rotary.dim} and inv_freq {list(rotary.inv_freq.shape)}; accepted: an "
            f"even dim of at most head_dim = {dim}, and inv_freq [dim / 2]"
        )
    if options.softcap is not None and not options.softcap > 0:
        raise ModelError(f"layer {layer}: softcap = {options.softcap!r}; accepted: a number above 0")
    _check_window(layer, options.window)


def _check_window(layer: int, window: int | None) -> None:
    if window is not None and not (type(window) is int and window >= 1):
        raise ModelError(f"layer {layer}: window = {window!r}; accepted: a number of tokens, 1 or more")
