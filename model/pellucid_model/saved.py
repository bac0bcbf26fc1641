"""Weights saved by torch.save or safetensors, in one file: a state dict, alone or inside a training checkpoint.

In: a .pt, .pth, .bin, .ckpt or .safetensors file. Out: its tensors and the settings stored beside them. Pickles are
read by torch.load(weights_only=True), which builds tensors, numbers, strings and containers and nothing else; a file
that wants more is refused, and no code of it runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid_model.checkpoint_kind import PICKLED
from pellucid_model.errors import CheckpointError
from pellucid_model.weight_files import read_pickle, read_tensors

STATES = ("model", "state_dict", "model_state_dict", "module", "net", "weights")
"""Where training scripts put the state dict."""
SETTINGS = ("model_args", "model_config", "config", "hyper_parameters", "hparams", "args")
"""Where they put what the model was built from, the likelier first."""


_SCALAR = np.float64(0).__reduce__()[0]
_NUMBERS: list[Any] = [
    (_SCALAR, "numpy._core.multiarray.scalar"),
    (_SCALAR, "numpy.core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(name)) for name in ("float64", "float32", "int64", "int32", "bool")),
]
"""What a numpy number, such as a best loss, is made of in a pickle: no code."""


@dataclass(frozen=True)
class SavedWeights:
    """What one file holds."""

    tensors: dict[str, Tensor]
    settings: dict[str, Any] = field(default_factory=dict)
    """What the model was built from; empty where the file does not say."""
    keys: frozenset[str] = frozenset()
    """Keys of the training checkpoint around the state dict; empty where there is none."""


def read_saved(path: Path) -> SavedWeights:
    """Raises CheckpointError naming the file."""
    if path.suffix not in PICKLED:
        return SavedWeights(read_tensors(path))
    with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(_NUMBERS):
        content = read_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; accepted: a state dict, or a dict with one")
    if _is_state(content):
        return SavedWeights(dict(content))
    found = next((content[key] for key in STATES if _is_state(content.get(key))), None)
    if found is None:
        keys = ", ".join(sorted(map(str, content))[:8]) or "nothing"
        raise CheckpointError(f"{path} holds no state dict under any of {', '.join(STATES)}; it holds {keys}")
    settings = [content[key] for key in SETTINGS if isinstance(content.get(key), Mapping)]
    return SavedWeights(dict(found), dict(settings[0]) if settings else {}, frozenset(map(str, content)))


def _is_state(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(tensor, Tensor) for tensor in value.values())
