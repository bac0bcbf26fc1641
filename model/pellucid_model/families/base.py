"""How a family of checkpoints is declared: a reading of its config, and rules that make its tensors ours.

In: their config.json and their tensors by name. Out: a DecoderConfig, and tensors by our names. What does not fit is
refused with one line in their words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from pellucid_model.config import DecoderConfig
from pellucid_model.errors import CheckpointError
from pellucid_model.families.reader import ConfigReader

Change = Callable[[Tensor, DecoderConfig], Sequence[Tensor]]
"""What is done to a stored tensor: one or several tensors come out. The common ones are in changes.py."""


@dataclass(frozen=True)
class Rule:
    """One kind of tensor: what they call it, what becomes of it, and what we call that.

    In names {i} stands for the layer's number and {kind} for `weight` or `bias`. Without a change the tensor is ours as
    it is; a change makes one tensor for each of our names.
    """

    theirs: str
    ours: str | tuple[str, ...]
    change: Change | None = None

    def __post_init__(self) -> None:
        for ours in self.our_names:
            strange = set(re.findall(r"\{\w*\}", ours)) - set(re.findall(r"\{\w*\}", self.theirs))
            if strange:
                raise ValueError(f"rule {self.theirs}: {ours} has {', '.join(strange)}, which their name has not")

    @property
    def our_names(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def match(self, name: str) -> tuple[str, ...] | None:
        """Our names for one of their tensors; None where the rule is not about it."""
        found = _pattern(self.theirs).fullmatch(name)
        return found and tuple(ours.format(**found.groupdict()) for ours in self.our_names)

    def their_name(self, ours: str) -> str | None:
        """The reverse of `match`: which of their tensors ours comes from."""
        for pattern in self.our_names:
            found = _pattern(pattern).fullmatch(ours)
            if found:
                return self.theirs.format(**found.groupdict())
        return None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    pattern = re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)")
    return re.compile(pattern.replace(r"\{kind\}", "(?P<kind>weight|bias)"))


def amended(rules: Sequence[Rule], *differs: Rule) -> tuple[Rule, ...]:
    """A relative's rules: `differs` take the place of those about the same tensors, theirs or ours."""

    def tensors(rule: Rule) -> set[str]:
        """Theirs and ours, whether weight or bias."""
        return {name.rpartition(".")[0] for name in ("theirs." + rule.theirs, *rule.our_names)}

    replaced = set().union(*map(tensors, differs))
    return (*differs, *(rule for rule in rules if not replaced & tensors(rule)))


@dataclass(frozen=True)
class Adopted:
    """Their tensors as ours."""

    tensors: dict[str, Tensor]
    origin: dict[str, str]
    """Our name -> the name of the stored tensor that it comes from."""


@dataclass(frozen=True)
class Family:
    """A `model_type`, how its config reads, and what its tensors are called."""

    model_type: str
    read: Callable[[ConfigReader], DecoderConfig]
    rules: tuple[Rule, ...]
    prefix: str = ""
    """What stands before the body's names; checkpoints of the body alone lack it. The rules do without."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors without meaning: masks and tables that are formulas."""

    def config(self, values: Mapping[str, Any], notices: list[str] | None = None) -> DecoderConfig:
        """Read a config.json; what the operator should know is added to `notices`. Raises ConfigError."""
        reader = ConfigReader(values, [] if notices is None else notices)
        config = self.read(reader)
        reader.done()
        return config

    def adopt(self, tensors: Mapping[str, Tensor], config: DecoderConfig) -> Adopted:
        """All stored tensors as ours; one that no rule knows keeps its name. Raises CheckpointError."""
        adopted = Adopted({}, {})
        for stored, tensor in tensors.items():
            theirs = stored.removeprefix(self.prefix)
            if any(re.fullmatch(pattern, theirs) for pattern in self.ignored):
                continue
            for ours, part in self._changed(theirs, stored, tensor, config):
                if ours in adopted.origin:
                    raise CheckpointError(f"{stored} and {adopted.origin[ours]} are the same tensor of the model")
                adopted.tensors[ours], adopted.origin[ours] = part, stored
        return adopted

    def _changed(self, theirs: str, stored: str, tensor: Tensor, config: DecoderConfig) -> Sequence[tuple[str, Tensor]]:
        for rule in self.rules:
            names = rule.match(theirs)
            if names is None:
                continue
            if rule.change is None:
                return [(names[0], tensor)]
            try:
                return list(zip(names, rule.change(tensor, config), strict=True))
            except (RuntimeError, ValueError, IndexError):
                shape = list(tensor.shape)
                raise CheckpointError(f"{stored} has shape {shape}, which does not fit config.json") from None
        return [(stored, tensor)]

    def their_name(self, ours: str, stored: Sequence[str]) -> str:
        """What they call one of our tensors, prefixed as the stored ones are; ours where no rule leads to it."""
        names = [theirs for rule in self.rules if (theirs := rule.their_name(ours)) is not None]
        prefixed = not ours.startswith("head.") and any(name.startswith(self.prefix) for name in stored)
        return " or ".join(self.prefix * prefixed + theirs for theirs in dict.fromkeys(names)) or ours
