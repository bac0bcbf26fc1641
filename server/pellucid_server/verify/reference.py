"""What the logits should be, computed the slow way: whole sequences, nothing cached, nothing shared with the engine.

The user's own forward where there is one to compare with; else the served module itself in float64, over attention as
the textbook writes it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pellucid_model.adopt import AdoptedModule, logits_of
from pellucid_model.attention import ReferenceAttend
from pellucid_model.contract import Attend, DecoderModel
from pellucid_model.errors import ModelError
from pellucid_model.servable import load_module, load_servable
from pellucid_model.user_module import find_object, one_line
from pellucid_model.windows import RollingAttend
from pellucid_server.engine.memory import available_memory
from pellucid_server.kv.window import ContextWindow
from pellucid_server.verify.watching import Trace, WatchedAttend

TRANSFORMERS = "transformers"


class Reference(ABC):
    """Logits of whole sequences."""

    what: str
    """What it is, for people."""
    module: nn.Module | None = None
    """Whose parts can be watched; None where it is a function."""

    @abstractmethod
    def logits(self, tokens: list[int]) -> Tensor:
        """[n, V], a row behind each token. Raises ModelError, one line, whatever goes wrong."""

    @abstractmethod
    def rows(self, tokens: list[int]) -> Tensor:
        """The same in one forward, which may give the last row only. Raises what the forward does."""

    def rolled(self, tokens: list[int], context: ContextWindow) -> Tensor | None:
        """[n, V] under a rolling window; None where this reference cannot say."""
        return None

    def watched(self, trace: Trace) -> AbstractContextManager[None]:
        """Notes what goes through attend, where this reference has one."""
        return nullcontext()

    def reencoded(self, tokens: list[int], context: ContextWindow) -> Tensor:
        """[n, V], each token from its own view of the past. Tokens of one origin share a view."""
        rows: list[Tensor] = []
        for t in range(len(tokens)):
            moved = t + 1 == len(tokens) or context.offset(t + 1) != context.offset(t)
            if moved:
                seen = self.logits(view_of(tokens, t, context))
                rows.extend(seen[len(rows) - context.offset(t) :])
        return torch.stack(rows)


def view_of(tokens: list[int], t: int, context: ContextWindow) -> list[int]:
    """The tokens that token t sees under a re-encoded window, and under none."""
    sinks, offset = context.sinks, context.offset(t)
    return tokens[: t + 1] if offset == 0 else tokens[:sinks] + tokens[sinks + offset : t + 1]


class OwnModule(Reference):
    """A module of the contract over ReferenceAttend."""

    def __init__(self, module: nn.Module, what: str) -> None:
        self.module = module
        self._model = cast("DecoderModel", module)
        self._trace: Trace | None = None
        self.what = f"{what} over textbook attention"

    def logits(self, tokens: list[int]) -> Tensor:
        with _one_line_errors(self.what, tokens):
            return self.rows(tokens)

    def rows(self, tokens: list[int]) -> Tensor:
        return self._rows(tokens, ReferenceAttend([len(tokens)], torch.arange(len(tokens))))

    def rolled(self, tokens: list[int], context: ContextWindow) -> Tensor | None:
        with _one_line_errors(self.what, tokens):
            return self._rows(tokens, RollingAttend(context.sinks, context.window))

    @contextmanager
    def watched(self, trace: Trace) -> Iterator[None]:
        self._trace = trace
        try:
            yield
        finally:
            self._trace = None

    @torch.no_grad()
    def _rows(self, tokens: list[int], attend: Attend) -> Tensor:
        positions = torch.arange(len(tokens))
        attend = attend if self._trace is None else WatchedAttend(attend, self._trace)
        return self._model.logits(self._model.forward(torch.tensor(tokens), positions, attend))


class OwnForward(Reference):
    """A forward of batch form, tokens [1, n] -> logits [1, n, V], alone, first in a tuple, or as `logits`."""

    def __init__(self, call: Callable[[Tensor], Any], what: str, module: nn.Module | None = None) -> None:
        self._call, self.what, self.module = call, what, module

    def logits(self, tokens: list[int]) -> Tensor:
        with _one_line_errors(self.what, tokens):
            rows = self.rows(tokens)
            if len(rows) == 1:  # it may give the last one only
                rows = torch.cat([self.rows(tokens[: t + 1]) for t in range(len(tokens))])
        if len(rows) != len(tokens):
            raise ModelError(f"{self.what} gives {len(rows)} rows of logits for {len(tokens)} tokens")
        return rows

    @torch.no_grad()
    def rows(self, tokens: list[int]) -> Tensor:
        return logits_of(self._call(torch.tensor([tokens])))


@contextmanager
def _one_line_errors(what: str, tokens: list[int]) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{what} fails on {len(tokens)} tokens: {one_line(error)}") from error


def make_reference(path: Path, module: str, wanted: str, length: int) -> Reference:
    """`wanted` names FILE.py:CLASS or FILE.py:FUNCTION, or is "transformers"; "": the module that is served.

    length: tokens of the longest sequence that it will be asked for
    """
    if wanted == TRANSFORMERS:
        return _settled(lambda: _from_transformers(path), length)
    if wanted:
        return _settled(lambda: _from_file(path, wanted), length)
    return _settled(lambda: _what_is_served(path, module), length)


def _what_is_served(path: Path, module: str) -> Reference:
    if not module:
        servable = load_servable(path)
        return OwnModule(servable.module, f"the same {servable.architecture}")
    built, _ = load_module(path, module)
    name = module.rpartition(":")[2]
    if isinstance(built, AdoptedModule):
        return OwnForward(lambda tokens: built.own_forward(tokens[0]), f"{type(built.module).__name__}.forward", built)
    return OwnModule(built, f"the same {name}")


def _from_file(path: Path, wanted: str) -> Reference:
    found, name = find_object(wanted), wanted.rpartition(":")[2]
    if isinstance(found, type) and issubclass(found, nn.Module):
        module, _ = load_module(path, wanted, methods=("forward",))
        if hasattr(found, "logits") and not isinstance(module, AdoptedModule):
            return OwnModule(module, name)
        call = (lambda tokens: module.own_forward(tokens[0])) if isinstance(module, AdoptedModule) else module
        return OwnForward(call, f"{name}.forward", module)
    if callable(found):
        return OwnForward(found, f"{name}()")
    raise ModelError(f"{wanted}: the file has no class or function of the name {name!r}")


def _from_transformers(path: Path) -> Reference:
    try:
        transformers = importlib.import_module(TRANSFORMERS)
    except ModuleNotFoundError:
        raise ModelError("--reference transformers: the package is not installed; pip install transformers") from None
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    except Exception as error:
        raise ModelError(f"--reference transformers: {one_line(error)[:300]}") from None
    return OwnForward(model.eval(), f"transformers' {type(model).__name__}", model)


def _settled(make: Callable[[], Reference], length: int) -> Reference:
    """In float64 where its module and the memory allow it, else in float32, made anew: modules may keep tensors."""
    reference = make()
    if reference.module is None:
        return reference
    parameters = sum(parameter.numel() for parameter in reference.module.parameters())
    if 8 * parameters < available_memory() // 2:
        reference.module.double()
        try:
            for count in (1, length):
                reference.rows([0] * count)
            reference.what += " in float64"
            return reference
        except ModelError:
            raise
        except Exception:  # a type that is written into the module
            reference = make()
    if reference.module is not None:
        reference.module.float()
    reference.what += " in float32"
    return reference
