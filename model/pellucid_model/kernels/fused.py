"""Linear layers together with what stands before and after them, in one call: the same bits as one after the other.

    norm of x             once, for all layers that read it, and so is the rounding of x to bfloat16 or whole numbers
    several layers        query, key and value of the same x share one round of threads
    gate and activation   activation(gate(x)) * layer(x); without a gate activation(layer(x))
    residual              added last

What is fused saves memory traffic and rounds of threads, most where rows are few or layers small.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pellucid_model.kernels import library
from pellucid_model.kernels.interface import Activation, PackedLinear, WeightFormat
from pellucid_model.kernels.native import NativeKernels

FORMATS: tuple[str, ...] = get_args(WeightFormat)
ACTIVATIONS: tuple[str | None, ...] = (None, *get_args(Activation))
NORMS = (None, "rms", "layer")
"""Numbers of the C++ enumerations are places in these."""


class LinearLayer(ctypes.Structure):
    """Mirrors LinearLayer in src/linear_arguments.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias", "gate_weight", "gate_bias", "residual", "out")),
        *((name, c_int64) for name in ("outputs", "rounded_stride")),
        ("activation", c_int32),
    )


class LinearArguments(ctypes.Structure):
    """Mirrors LinearArguments in src/linear_arguments.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "norm_weight", "norm_bias", "layers")),
        *((name, c_int64) for name in ("layer_count", "rows", "inputs")),
        ("norm_epsilon", c_float),
        *((name, c_int32) for name in ("norm", "format", "threads", "is_rounded")),
        *((name, c_void_p) for name in ("next", "reading", "prepared")),
    )


@dataclass(frozen=True, eq=False)
class Norm:
    """Over all of a row; weight and bias float32 [K]."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """One layer and what follows it."""

    packed: PackedLinear
    gate: PackedLinear | None = None
    activation: Activation | None = None
    residual: Tensor | None = None
    """[rows, N] float32."""


def fused_linear(
    kernels: NativeKernels, x: Tensor, layers: Sequence[FusedLayer], norm: Norm | None = None
) -> list[Tensor]:
    """x [rows, K] float32 -> for each layer [rows, N]. ValueError where layers do not fit x or each other."""
    rows, inputs = x.shape
    for layer in layers:
        _check(layer, inputs, layers[0].packed.format)
    outs = [torch.empty(rows, layer.packed.out_features) for layer in layers]
    compiled = (LinearLayer * len(layers))(*(linear_layer(each.packed, each.gate, each.activation) for each in layers))
    for layer, arguments_of, out in zip(layers, compiled, outs, strict=True):
        arguments_of.out, arguments_of.residual = out.data_ptr(), address(layer.residual)
    x = x.contiguous()
    arguments = linear_arguments(compiled, layers[0].packed, norm)
    arguments.x, arguments.rows, arguments.threads = x.data_ptr(), rows, library.threads()
    kernels.library.pellucid_fused_linear(ctypes.byref(arguments))
    return outs


def _check(layer: FusedLayer, inputs: int, format: WeightFormat) -> None:
    packed, gate = layer.packed, layer.gate
    if packed.in_features != inputs or packed.format != format:
        own = f"{packed.in_features} inputs in {packed.format}"
        raise ValueError(f"a layer of {own} does not go with {inputs} in {format}")
    if gate is not None and (gate.in_features, gate.out_features, gate.format) != (inputs, packed.out_features, format):
        raise ValueError("a gate must have its layer's shape and format")
    if gate is not None and layer.activation is None:
        raise ValueError("a gate needs an activation")


def linear_layer(packed: PackedLinear, gate: PackedLinear | None, activation: Activation | None) -> LinearLayer:
    """What is fixed of a layer: all but where its numbers lie. Weights must outlive it."""
    return LinearLayer(
        weight=packed.weight.data_ptr(),
        bias=address(packed.bias),
        gate_weight=None if gate is None else gate.weight.data_ptr(),
        gate_bias=None if gate is None else address(gate.bias),
        outputs=packed.out_features,
        activation=ACTIVATIONS.index(activation),
    )


def linear_arguments(layers: ctypes.Array[LinearLayer], first: PackedLinear, norm: Norm | None) -> LinearArguments:
    """What is fixed of a call with these layers, of which `first` is one. Layers and norm must outlive it."""
    return LinearArguments(
        norm_weight=None if norm is None else address(norm.weight),
        norm_bias=None if norm is None else address(norm.bias),
        layers=ctypes.addressof(layers),
        layer_count=len(layers),
        inputs=first.in_features,
        norm_epsilon=0.0 if norm is None else norm.eps,
        norm=0 if norm is None else NORMS.index(norm.kind),
        format=FORMATS.index(first.format),
    )


def address(numbers: Tensor | array[int] | array[float] | None) -> int | None:
    """Where the numbers lie in memory."""
    if isinstance(numbers, array):
        return numbers.buffer_info()[0]
    return None if numbers is None else numbers.data_ptr()
