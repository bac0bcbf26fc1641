"""Puts kernels under an existing model: replaces its standard layers by twins that call them.

Only exact torch.nn types are replaced; a user's subclass may do something else and is left alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn

from pellucid_model.kernels.interface import Activation, Kernels, PackedLinear


def accelerate(model: nn.Module, kernels: Kernels, dtype: torch.dtype) -> None:
    """Replace, in place, every Linear, LayerNorm, RMSNorm, ReLU, GELU and SiLU inside `model`.

    The twins take float32 tensors; Linear weights are stored in `dtype`. Linears that are tied to one Parameter share
    one packed weight. An original weight is freed unless somebody else, such as a tied embedding, still holds it.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    weights = Counter(id(module.weight) for module in set(named.values()) if type(module) is nn.Linear)
    names = [name for name in named if name]
    del named  # so that each original can go as soon as it is replaced

    packed: dict[int, PackedLinear] = {}  # by id of a shared weight
    twins: dict[int, nn.Module] = {}  # by id of the original: one module may stand in several places
    for name in names:
        original = model.get_submodule(name)
        twin = twins.get(id(original))
        if twin is None:
            if type(original) is nn.Linear:
                twin = _linear(original, kernels, dtype, packed, tied=weights[id(original.weight)] > 1)
            else:
                twin = _norm_or_activation(original, kernels)
            if twin is None:
                continue
            twins[id(original)] = twin
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, twin)


def _linear(
    original: nn.Linear, kernels: Kernels, dtype: torch.dtype, packed: dict[int, PackedLinear], tied: bool
) -> nn.Module:
    key = id(original.weight)
    if key in packed:
        return Linear(kernels, replace(packed[key], bias=_float32(original.bias)))
    layer = kernels.pack_linear(original.weight, original.bias, dtype)
    if tied:
        packed[key] = layer
    return Linear(kernels, layer)


def _norm_or_activation(original: nn.Module, kernels: Kernels) -> nn.Module | None:
    if type(original) is nn.LayerNorm and len(original.normalized_shape) == 1:
        return LayerNorm(kernels, original)
    if type(original) is nn.RMSNorm and len(original.normalized_shape) == 1:
        return RMSNorm(kernels, original)
    if type(original) is nn.ReLU:
        return ActivationFunction(kernels, "relu")
    if type(original) is nn.SiLU:
        return ActivationFunction(kernels, "silu")
    if type(original) is nn.GELU:
        return ActivationFunction(kernels, "gelu_tanh" if original.approximate == "tanh" else "gelu")
    return None


class Linear(nn.Module):
    """x [..., K] -> [..., N]"""

    def __init__(self, kernels: Kernels, packed: PackedLinear) -> None:
        super().__init__()
        self._kernels, self._packed = kernels, packed

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._packed)


class LayerNorm(nn.Module):
    """Over the last dimension of x."""

    def __init__(self, kernels: Kernels, original: nn.LayerNorm) -> None:
        super().__init__()
        self._kernels, self._eps = kernels, original.eps
        self._weight, self._bias = _float32(original.weight), _float32(original.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)


class RMSNorm(nn.Module):
    """Over the last dimension of x."""

    def __init__(self, kernels: Kernels, original: nn.RMSNorm) -> None:
        super().__init__()
        self._kernels = kernels
        self._eps = torch.finfo(torch.float32).eps if original.eps is None else original.eps
        self._weight = _float32(original.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)


class ActivationFunction(nn.Module):
    """Elementwise."""

    def __init__(self, kernels: Kernels, kind: Activation) -> None:
        super().__init__()
        self._kernels, self._kind = kernels, kind

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.activation(self._kind, x)


def _float32(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach().float().contiguous()
