"""From a checkpoint folder, and perhaps a file with your own module, to something the engine runs.

Your own module is any nn.Module that follows `contract.py`: docs/add-your-model.md. Its file is executed, because the
operator named it; nothing else ever is.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from pellucid_model.attention import ReferenceAttend
from pellucid_model.checkpoint import load_checkpoint, load_tensors, read_json, refuse, widest
from pellucid_model.contract import DecoderModel, PositionScheme
from pellucid_model.errors import CheckpointError, ModelError

WRAPPERS = ("_orig_mod.", "module.")
"""What torch.compile and data parallelism put before the names of tensors."""
_SCHEMES = ("rotary", "alibi", "none", "absolute")


@dataclass(frozen=True)
class Servable:
    """A model in evaluation mode on the CPU, as stored, with what the engine must know of it."""

    module: nn.Module
    architecture: str
    vocab_size: int
    context_length: int | None
    """Trained context; None where neither module nor checkpoint says."""
    position_scheme: PositionScheme
    dtype: torch.dtype
    """What the weights are stored in; the widest where they differ."""
    custom: bool
    notices: tuple[str, ...] = ()

    @property
    def model(self) -> DecoderModel:
        return cast("DecoderModel", self.module)


def load_servable(folder: Path, source: str = "") -> Servable:
    """Load a folder, as `source` ("FILE.py:CLASS") where it is given. Raises ModelError, one line."""
    if source:
        return _load_custom(folder, source)
    checkpoint = load_checkpoint(folder)
    return Servable(
        module=checkpoint.model,
        architecture=checkpoint.architecture,
        vocab_size=checkpoint.config.vocab_size,
        context_length=checkpoint.config.context_length,
        position_scheme=checkpoint.model.position_scheme,
        dtype=checkpoint.dtype,
        custom=False,
        notices=checkpoint.notices,
    )


def _load_custom(folder: Path, source: str) -> Servable:
    config = read_json(folder / "config.json")
    module = _build(_find_class(source), config, source)
    tensors = load_tensors(folder)
    _load_state(folder, module, tensors)
    module.eval()
    scheme = getattr(module, "position_scheme", "absolute")
    if scheme not in _SCHEMES:
        raise ModelError(f"{source}: position_scheme = {scheme!r}; accepted: {', '.join(_SCHEMES)}")
    context = getattr(module, "context_length", None) or config.get("context_length")
    if context is not None and (type(context) is not int or context < 1):
        raise ModelError(f"{source}: context_length = {context!r}; accepted: a number of tokens, 1 or more")
    return Servable(
        module=module,
        architecture=source.rpartition(":")[2],
        vocab_size=_dry_run(module, source),
        context_length=context,
        position_scheme=cast("PositionScheme", scheme),
        dtype=widest(tensors),
        custom=True,
    )


def _find_class(source: str) -> type[nn.Module]:
    file, _, name = source.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ModelError(f"{source}: there is no file {file!r}; name it as FILE.py:CLASS")
    found = getattr(_execute(path), name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ModelError(f"{source}: {file} has no nn.Module of the name {name!r}")
    for method in ("forward", "logits"):
        if not inspect.isfunction(getattr(found, method, None)):
            raise ModelError(f"{source}: {name} has no method {method}; see docs/add-your-model.md")
    return found


def _execute(path: Path) -> ModuleType:
    """Run the user's file; what lies beside it can be imported from it."""
    spec = importlib.util.spec_from_file_location(f"pellucid_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} is not a Python file")
    python = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = python
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(python)
    except Exception as error:
        raise ModelError(f"{path} cannot be run: {_one_line(error)}") from error
    return python


def _build(kind: type[nn.Module], config: dict[str, Any], source: str) -> nn.Module:
    try:
        return kind(config)
    except Exception as error:
        raise ModelError(f"{source} cannot be built from config.json: {_one_line(error)}") from error


def _load_state(folder: Path, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Every stored tensor is used and none of the module's is missing; one that is tied need be stored only once."""
    expected = module.state_dict(keep_vars=True)
    state = {_unwrapped(name, expected): tensor for name, tensor in tensors.items()}
    for name, parameter in expected.items():
        twins = (other for other, shared in expected.items() if shared is parameter and other in state)
        if name not in state and (twin := next(twins, None)) is not None:
            state[name] = state[twin]
    refuse(f"checkpoint {folder}: tensors are missing", set(expected) - set(state))
    refuse(f"checkpoint {folder}: tensors that the module does not have", set(state) - set(expected))
    for name, tensor in state.items():
        want, have = list(expected[name].shape), list(tensor.shape)
        if want != have:
            raise CheckpointError(f"checkpoint {folder}: {name} has shape {have}, but the module's is {want}")
    module.float().load_state_dict(state)


def _unwrapped(name: str, expected: dict[str, Any]) -> str:
    while name not in expected and name.startswith(WRAPPERS):
        name = name.removeprefix(WRAPPERS[0] if name.startswith(WRAPPERS[0]) else WRAPPERS[1])
    return name


@torch.inference_mode()
def _dry_run(module: nn.Module, source: str) -> int:
    """Run one token through the module -> vocabulary size. What breaks here breaks the contract."""
    token = torch.zeros(1, dtype=torch.int64)
    model = cast("DecoderModel", module)
    try:
        hidden = model.forward(token, token, ReferenceAttend([1], token))
        logits = model.logits(hidden)
    except Exception as error:
        raise ModelError(f"{source} breaks the contract of docs/add-your-model.md: {_one_line(error)}") from error
    if hidden.dim() != 2 or logits.dim() != 2 or hidden.shape[0] != 1 or logits.shape[0] != 1:
        shapes = f"hidden {list(hidden.shape)}, logits {list(logits.shape)}"
        raise ModelError(f"{source} breaks the contract: for one token it gives {shapes}, not [1, d] and [1, V]")
    return logits.shape[1]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
