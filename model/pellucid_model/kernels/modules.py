"""Puts kernels under an existing model: replaces its standard layers by twins that call them.

Only exact torch.nn types are replaced; a user's subclass may do something else and is left alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from pellucid_model.kernels.interface import Function, Kernels, PackedLinear, Table, WeightFormat

HEAD_RATIO = 8
"""A linear layer with more than so many outputs for each input is taken for a head that makes logits."""


def accelerate(model: nn.Module, kernels: Kernels, format: WeightFormat, dtype: torch.dtype | None = None) -> None:
    """Replace, in place, every Linear, Embedding, LayerNorm, RMSNorm, ReLU, GELU, SiLU, Tanh and Sigmoid in `model`.

    The twins take float32 tensors; Linear weights are stored in `format`, but those of heads in int8 where it is int4:
    errors of logits are not mended by any layer behind them. Linears that are tied to one Parameter share one packed
    weight. An original weight is freed unless somebody else, such as a tied embedding, still holds it.

    Embeddings are rounded to `dtype`, float32 or bfloat16; None: as the linear weights, bfloat16 beside whole numbers.
    What bfloat16 holds without loss is kept in it anyway. One that is tied to a Linear reads that one's packed weight,
    where it is of the same type.

    ValueError names the layer whose weight the format cannot hold.
    """
    rounds = format != "float32" if dtype is None else dtype == torch.bfloat16
    named = dict(model.named_modules(remove_duplicate=False))
    weights = Counter(id(module.weight) for module in set(named.values()) if type(module) in (nn.Linear, nn.Embedding))
    names = [name for name in named if name]
    del named  # so that each original can go as soon as it is replaced

    packed: dict[int, PackedLinear] = {}  # by id of a shared weight
    twins: dict[int, nn.Module] = {}  # by id of the original: one module may stand in several places
    embeddings: list[str] = []  # last, when all that they may be tied to is packed
    for name in names:
        original = model.get_submodule(name)
        twin = twins.get(id(original))
        if twin is None:
            if type(original) is nn.Linear:
                tied = weights[id(original.weight)] > 1
                try:
                    twin = _linear(original, kernels, _fitting(format, original), packed, tied)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            elif type(original) is nn.Embedding and original.max_norm is None:
                embeddings.append(name)
            else:
                twin = _norm_or_activation(original, kernels)
            if twin is None:
                continue
            twins[id(original)] = twin
        _replace(model, name, twin)
    for name in embeddings:
        original = model.get_submodule(name)
        if not isinstance(original, nn.Embedding):
            continue  # it stands in a module that has two names
        if id(original) not in twins:
            twins[id(original)] = _embedding(original, kernels, packed, rounds=rounds)
        _replace(model, name, twins[id(original)])


def _replace(model: nn.Module, name: str, twin: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, twin)


def weight_bytes(model: nn.Module) -> int:
    """Memory of an accelerated model's weights, each counted once however often it is used."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [module.packed.weight for module in model.modules() if isinstance(module, Linear)]
    tensors += [module.table.weight for module in model.modules() if isinstance(module, Embedding)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _fitting(format: WeightFormat, layer: nn.Linear) -> WeightFormat:
    is_head = layer.out_features > HEAD_RATIO * layer.in_features
    return "int8" if format == "int4" and is_head else format


def _linear(
    original: nn.Linear, kernels: Kernels, format: WeightFormat, packed: dict[int, PackedLinear], tied: bool
) -> nn.Module:
    key = id(original.weight)
    if key in packed:
        return Linear(kernels, replace(packed[key], bias=_float32(original.bias)))
    layer = kernels.pack_linear(original.weight, original.bias, format)
    if tied:
        packed[key] = layer
    return Linear(kernels, layer)


def _embedding(original: nn.Embedding, kernels: Kernels, packed: dict[int, PackedLinear], *, rounds: bool) -> Embedding:
    weight = original.weight
    format: Literal["float32", "bfloat16"] = "bfloat16" if rounds or _fits_bfloat16(weight) else "float32"
    tied = packed.get(id(weight))
    table = kernels.table_of(tied) if tied is not None and tied.format in (format, "float32") else None
    return Embedding(kernels, kernels.make_table(weight, format) if table is None else table)


def _fits_bfloat16(weight: Tensor) -> bool:
    """Whether it has no number that bfloat16 would change; looked at in parts, which take little memory."""
    if weight.dtype == torch.bfloat16:
        return True
    return all(torch.equal(part.bfloat16().to(part.dtype), part) for part in weight.detach().split(1024))


def _norm_or_activation(original: nn.Module, kernels: Kernels) -> nn.Module | None:
    if type(original) is nn.LayerNorm and len(original.normalized_shape) == 1:
        return LayerNorm(kernels, original)
    if type(original) is nn.RMSNorm and len(original.normalized_shape) == 1:
        return RMSNorm(kernels, original)
    if type(original) is nn.ReLU:
        return ActivationFunction(kernels, "relu", inplace=original.inplace)
    if type(original) is nn.SiLU:
        return ActivationFunction(kernels, "silu", inplace=original.inplace)
    if type(original) is nn.Tanh:
        return ActivationFunction(kernels, "tanh")
    if type(original) is nn.Sigmoid:
        return ActivationFunction(kernels, "sigmoid")
    if type(original) is nn.GELU:
        return ActivationFunction(kernels, "gelu_tanh" if original.approximate == "tanh" else "gelu")
    return None


class Linear(nn.Module):
    """x [..., K] -> [..., N]"""

    def __init__(self, kernels: Kernels, packed: PackedLinear) -> None:
        super().__init__()
        self.kernels, self.packed = kernels, packed

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.packed)


class Embedding(nn.Module):
    """indices [...] int64 -> [..., width]"""

    def __init__(self, kernels: Kernels, table: Table) -> None:
        super().__init__()
        self.kernels, self.table = kernels, table
        self.num_embeddings, self.embedding_dim = table.count, table.width  # for modules that ask

    def forward(self, indices: Tensor) -> Tensor:
        return self.kernels.look_up(indices.long(), self.table)

    @functools.cached_property
    def weight(self) -> Tensor:
        """[count, width] float32: for modules that do more with it than look rows up. Made when it is asked for."""
        return self.kernels.look_up(torch.arange(self.table.count), self.table)


class LayerNorm(nn.Module):
    """Over the last dimension of x."""

    def __init__(self, kernels: Kernels, original: nn.LayerNorm) -> None:
        super().__init__()
        self.kernels, self._eps = kernels, original.eps
        self._weight, self._bias = _float32(original.weight), _float32(original.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self._weight, self._bias, self._eps)


class RMSNorm(nn.Module):
    """Over the last dimension of x."""

    def __init__(self, kernels: Kernels, original: nn.RMSNorm) -> None:
        super().__init__()
        self.kernels = kernels
        self._eps = torch.finfo(torch.float32).eps if original.eps is None else original.eps
        self._weight = _float32(original.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self._weight, self._eps)


class ActivationFunction(nn.Module):
    """Elementwise. `inplace`: into x itself, whose other readers may count on it."""

    def __init__(self, kernels: Kernels, kind: Function, *, inplace: bool = False) -> None:
        super().__init__()
        self.kernels, self._kind, self._inplace = kernels, kind, inplace

    def forward(self, x: Tensor) -> Tensor:
        out = self.kernels.activation(self._kind, x)
        return x.copy_(out) if self._inplace else out


def _float32(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach().float().contiguous()


TWINS = (Linear, Embedding, LayerNorm, RMSNorm, ActivationFunction)
"""What stands in a module for its standard layers; each calls its `kernels`."""
