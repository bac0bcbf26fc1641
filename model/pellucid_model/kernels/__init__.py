"""The operators of the fast path: packed linear layers, norms, activations and paged attention.

`select_kernels(device)` gives an implementation of the `Kernels` protocol, whose shapes interface.py states:

    native    compiled C++ for the CPU (src/, compiled by build.py, loaded by library.py). Batch-invariant: each output
              element is one chain of operations in one order, so a row's bits depend neither on its neighbours, nor on
              the chunk it is prefilled in, nor on the cache's block size, nor on the number of threads.
    fallback  plain torch, for any device; slower, and not batch-invariant.

`accelerate(model, kernels, format)` puts them under a model's standard layers, and `RotaryTables` makes the angles.
PELLUCID_KERNELS=torch|portable|avx2|avx512|avx512-bf16|amx forces what runs on the CPU.
"""

from __future__ import annotations

import torch

from pellucid_model.kernels import library
from pellucid_model.kernels.fallback import TorchKernels
from pellucid_model.kernels.interface import Activation, Function, Kernels, PackedLinear, Table, WeightFormat
from pellucid_model.kernels.modules import accelerate, weight_bytes
from pellucid_model.kernels.native import NativeKernels
from pellucid_model.kernels.rotary_tables import RotaryTables

__all__ = [
    "Activation",
    "Function",
    "Kernels",
    "NativeKernels",
    "PackedLinear",
    "RotaryTables",
    "Table",
    "TorchKernels",
    "WeightFormat",
    "accelerate",
    "select_kernels",
    "weight_bytes",
]


def select_kernels(device: torch.device) -> Kernels:
    """The best kernels for a device: compiled ones on the CPU where they load, else torch.

    Raises ValueError where PELLUCID_KERNELS names something that this machine cannot run.
    """
    variant = library.variant()
    if device.type == "cpu" and variant != "torch":
        return NativeKernels(variant)
    return TorchKernels()
