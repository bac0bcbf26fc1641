"""Serves a module that was never written for us: batch form, tokens [1, L] in, logits [1, L, V] out, attention inside.

A few lines name its parts (docs/add-your-model.md); nothing of the module changes, and its state_dict loads as it was
saved. Its own forward runs over the ragged batch as one row of T tokens, and three things are caught on the way:

    attention   wherever it is: torch's scaled_dot_product_attention, nn.MultiheadAttention, or softmax(q·kᵀ·scale)·v
                written out; each becomes a call of `attend`, layers numbered in the order of the calls
    positions   the modules, parameters and buffers named in `positions` give what belongs to the tokens' true positions
    the end     forward is left where it comes to the output layer; `logits` applies that to the rows that need it
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pellucid_model.adopt_parts import (
    AddedEncoding,
    Arrived,
    Forward,
    Interception,
    arrival_forward,
    position_forward,
    prepare_torch_attention,
    tied_linear,
    torch_attention_forward,
)
from pellucid_model.contract import Attend, PositionScheme
from pellucid_model.errors import ModelError


class AdoptedModule(nn.Module):
    """Base of an adapter, which says how the module is built and called, and what its parts are named.

    In names, `*` stands for any characters.
    """

    positions: Sequence[str] = ()
    """Names of whatever depends on where a token stands: an nn.Embedding of positions, a module that adds an encoding,
    a parameter or buffer that forward slices by length."""
    head: str = "lm_head"
    """Name of the output layer: a module, or a parameter [V, d_model] that forward multiplies by."""
    hidden: str = ""
    """Name of the module whose output goes to the output layer; "": what the output layer is given. Needed where
    forward keeps the last token only, or where the head is a parameter."""
    batch_first: bool = True
    """False where the module wants tokens [L, 1]."""
    position_scheme: PositionScheme = "absolute"
    context_length: int | None = None
    ignored_tensors: Sequence[str] = ()
    """Names of stored tensors that are no weights, such as masks that older versions of the module saved."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.module = self.build(config)
        modules = dict(self.module.named_modules())
        self._torch_attention = [module for module in modules.values() if type(module) is nn.MultiheadAttention]
        for attention in self._torch_attention:
            prepare_torch_attention(attention)
        tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        names = self._named("positions", self.positions, [*modules, *tensors])
        self._position_tensors = [name for name in names if name in tensors]
        self._encodings = {
            name: AddedEncoding(modules[name], self.context_length, self.batch_first)
            for name in names
            if name in modules
        }
        self._tied_head: nn.Module | None = None
        if self.head in tensors:
            self._tied_head = tied_linear(self.module.get_parameter(self.head), None)
        else:
            self._named("head", (self.head,), modules)
        if self.hidden or self._tied_head is not None:
            self._named("hidden", (self.hidden,), modules)

    def build(self, config: dict[str, Any]) -> nn.Module:
        """The module itself, from what the checkpoint says it was built from."""
        raise ModelError(f"{type(self).__name__} has no method build(config) that makes the module")

    def call(self, tokens: Tensor) -> Any:
        """How the module is called on tokens [1, L], or [L, 1] where batch_first is False -> logits, alone or first."""
        return self.module(tokens)

    def own_forward(self, tokens: Tensor) -> Any:
        """The module's own answer to tokens [L], nothing caught."""
        return self.call(tokens[None] if self.batch_first else tokens[:, None])

    def own_logits(self, tokens: Tensor) -> Tensor:
        """tokens [L] -> [L, V], or [1, V] where the module's own forward keeps the last token only."""
        return logits_of(self.own_forward(tokens))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens [T], positions [T] -> hidden [T, d_model]."""
        run = Interception(self.module, attend, positions, map(self._tensor, self._position_tensors))
        try:
            with self._caught(run), run:
                self.own_forward(tokens)
        except Arrived as end:
            hidden = end.hidden.flatten(0, -2)
            if len(hidden) != len(tokens):
                raise ModelError(
                    f"{self.hidden or self.head} gets {len(hidden)} rows for {len(tokens)} tokens: name in `hidden` "
                    "the module whose output holds all of them"
                ) from None
            return hidden
        where = self.hidden or self.head
        raise ModelError(f"{type(self.module).__name__}.forward never comes to {where!r}")

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, d_model] -> [R, V]."""
        head = self._tied_head or self.module.get_submodule(self.head)
        logits: Tensor = head(hidden)
        return logits

    @contextmanager
    def _caught(self, run: Interception) -> Iterator[None]:
        """Puts other forwards over those of the parts, and takes them away again."""
        last = self.module.get_submodule(self.hidden or self.head)
        forwards: list[tuple[nn.Module, Forward]] = [
            *((module, torch_attention_forward(run, module)) for module in self._torch_attention),
            *(
                (module, position_forward(run, module, encoding))
                for name, encoding in self._encodings.items()
                for module in (self.module.get_submodule(name),)  # as it is now: the engine replaces embeddings
            ),
            (last, arrival_forward(last, after=bool(self.hidden))),
        ]
        for module, forward in forwards:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in forwards:
                module.__dict__.pop("forward", None)

    def _tensor(self, name: str) -> Tensor:
        """As it is now: a move to another type or device replaces buffers."""
        parent, _, leaf = name.rpartition(".")
        tensor: Tensor = getattr(self.module.get_submodule(parent), leaf)
        return tensor

    def _named(self, attribute: str, patterns: Sequence[str], there: Any) -> list[str]:
        """The names that are meant. Raises ModelError for a pattern that fits none."""
        found: list[str] = []
        for pattern in patterns:
            matching = [name for name in there if name and fnmatch.fnmatchcase(name, pattern)]
            if not matching:
                kind = type(self.module).__name__
                some = ", ".join([name for name in there if name and "." not in name][:8])
                raise ModelError(
                    f"{type(self).__name__}.{attribute}: {kind} has nothing named {pattern!r}; it has {some}"
                )
            found += matching
        return found


def logits_of(out: Any) -> Tensor:
    """[n, V], from what a forward of batch form returns: logits, alone, first in a tuple, or as `logits`."""
    if isinstance(out, tuple | list):
        out = out[0]
    out = out.get("logits") if isinstance(out, dict) else getattr(out, "logits", out)
    if not isinstance(out, Tensor) or out.dim() not in (2, 3):
        raise ModelError("forward gives no logits [1, n, V], alone, first in a tuple, or as `logits`")
    return out.flatten(0, -2)
