"""The user's own file: its class is found, built and filled with the stored weights.

In: "FILE.py:CLASS" and a checkpoint's tensors. Out: an nn.Module. The file is executed because the operator named it;
nothing else ever is. Whatever is wrong is a ModelError, one line that names it.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from pellucid_model.errors import CheckpointError, ModelError
from pellucid_model.weight_files import refuse


def find_class(source: str, methods: Iterable[str] = ("forward", "logits")) -> type[nn.Module]:
    """The nn.Module class of "FILE.py:CLASS", which has these methods."""
    found = find_object(source)
    file, _, name = source.rpartition(":")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ModelError(f"{source}: {file} has no nn.Module of the name {name!r}")
    for method in methods:
        if not inspect.isfunction(getattr(found, method, None)):
            raise ModelError(f"{source}: {name} has no method {method}; see docs/add-your-model.md")
    return found


def find_object(source: str) -> Any:
    """Whatever "FILE.py:NAME" names; None where the file has no such name."""
    file, _, name = source.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ModelError(f"{source}: there is no file {file!r}; name it as FILE.py:CLASS")
    return getattr(_execute(path), name, None)


def build(kind: type[nn.Module], config: dict[str, Any], source: str) -> nn.Module:
    try:
        return kind(config)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ModelError(f"{source} cannot be built from its config: {one_line(error)}") from error


def load_state(where: Path, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Every stored tensor is used and none of the module's is missing; one that is tied need be stored only once.

    Parameters become float32, so that nothing is lost of what was stored in fewer bits.
    """
    expected = module.state_dict(keep_vars=True)
    state = matched(where, module, tensors)
    for name, parameter in expected.items():
        twins = (other for other, shared in expected.items() if shared is parameter and other in state)
        if name not in state and (twin := next(twins, None)) is not None:
            state[name] = state[twin]
    refuse(f"checkpoint {where}: tensors are missing", set(expected) - set(state))
    refuse(f"checkpoint {where}: tensors that the module does not have", set(state) - set(expected))
    for name, tensor in state.items():
        want, have = list(expected[name].shape), list(tensor.shape)
        if want != have:
            raise CheckpointError(f"checkpoint {where}: {name} has shape {have}, but the module's is {want}")
    module.float().load_state_dict(state)


def matched(where: Path, module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors by the module's names; either side may have its wrappers' prefixes."""
    patterns = tuple(getattr(module, "ignored_tensors", ()))
    expected = list(module.state_dict(keep_vars=True))
    plain = Counter(map(without_wrappers, expected))
    ours = {without_wrappers(name): name for name in expected if plain[without_wrappers(name)] == 1}
    state: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        bare = without_wrappers(stored)
        if any(fnmatch.fnmatchcase(bare, pattern) for pattern in patterns):
            continue
        name = stored if stored in expected else ours.get(bare, bare)
        if name in state:
            raise CheckpointError(f"checkpoint {where}: {name} is stored twice, once as {stored}")
        state[name] = tensor
    return state


def without_wrappers(name: str) -> str:
    """A tensor's name without what torch.compile and data parallelism put into it, however often."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def part_of(error: BaseException, module: nn.Module) -> str:
    """The name of the innermost part of the module whose method the error came through; "" where it is its own."""
    names = {id(part): name for name, part in module.named_modules()}
    innermost, frame = "", error.__traceback__
    while frame is not None:
        innermost = names.get(id(frame.tb_frame.f_locals.get("self"))) or innermost
        frame = frame.tb_next
    return innermost


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
    except (Exception, SystemExit) as error:
        raise ModelError(f"{path} cannot be run: {one_line(error)}") from error
    return python
