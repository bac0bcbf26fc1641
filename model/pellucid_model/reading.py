"""Reads one sequence with the slow reference attention, and keeps all there is to see.

In: a module that follows the contract, and token ids. Out: a `Reading`: logits, hidden states between blocks, and the
attention maps with the window of each layer. `pellucid doctor` and `pellucid inspect` look at nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pellucid_model.attention import ReferenceAttend
from pellucid_model.blocks import find_blocks, hidden_of
from pellucid_model.contract import AttentionOptions, DecoderModel, Rotary
from pellucid_model.gathered import Gathered


@dataclass(frozen=True, eq=False)
class Reading:
    """What happened to a sequence of n tokens, all in float32 on the CPU."""

    tokens: list[int]
    logits: Tensor
    """[n, V]."""
    hidden: Tensor
    """[n, d_model], what the logits are made of."""
    residuals: list[Tensor]
    """Before the first block and after each one, [n, d_model]; empty where the module's blocks were not found."""
    attention: dict[int, Tensor]
    """By layer, [Hq, n, n]: the share of a key (last) in what a query (middle) takes. A layer that works on the whole
    score matrix itself is left out."""
    windows: dict[int, int | None]
    """By layer: how many tokens it sees, itself included; None: all."""
    gathered: list[int]
    """The layers that were left out of `attention`."""

    def entropy(self, layer: int) -> Tensor:
        """[Hq, n]: entropy of each row of a layer's maps in nats; 0: one token alone, ln(visible): all the same."""
        entropy: Tensor = torch.special.entr(self.attention[layer]).sum(dim=-1)
        return entropy

    def relative_entropy(self, layer: int) -> Tensor:
        """[Hq, n]: entropy as a share of the largest possible one, 0 … 1; nan where only one token is visible."""
        largest = self.visible(layer).float().log()
        return torch.where(largest > 0, self.entropy(layer) / largest, math.nan)

    def visible(self, layer: int) -> Tensor:
        """[n]: how many tokens each row may look at."""
        counts = torch.arange(1, len(self.tokens) + 1)
        window = self.windows.get(layer)
        return counts if window is None else counts.clamp(max=window)


class _WatchingAttend(ReferenceAttend):
    """The reference, which also remembers windows, and layers without a map."""

    def __init__(self, count: int) -> None:
        super().__init__([count], torch.arange(count), record=True)
        self.windows: dict[int, int | None] = {}
        self.gathering: list[int] = []

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        options: AttentionOptions,
        kv_from: int | None,
    ) -> Tensor:
        self.windows[layer] = options.window
        return super().attend(layer, q, k, v, options, kv_from)

    def gathered(
        self, layer: int, k: Tensor, v: Tensor, *, rotary: Rotary | None = None, window: int | None = None
    ) -> Gathered:
        self.gathering.append(layer)
        return super().gathered(layer, k, v, rotary=rotary, window=window)


@torch.no_grad()
def read(module: nn.Module, tokens: Sequence[int]) -> Reading:
    """tokens: 1 or more. The module is on the CPU and in evaluation mode."""
    ids = torch.tensor(list(tokens))
    attend = _WatchingAttend(len(ids))
    model = cast("DecoderModel", module)
    blocks = find_blocks(module)
    residuals: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: residuals.append(_kept(out))) for block in blocks]
    if blocks:
        hooks.append(blocks[0].register_forward_pre_hook(lambda _m, given: residuals.append(_kept(given))))
    try:
        hidden = model.forward(ids, attend.positions, attend)
    finally:
        for hook in hooks:
            hook.remove()
    logits = model.logits(hidden)
    whole = len(residuals) == len(blocks) + 1 and all(len(residual) == len(ids) for residual in residuals)
    return Reading(
        tokens=list(tokens),
        logits=logits.float(),
        hidden=hidden.float(),
        residuals=residuals if whole else [],
        attention={layer: maps[0].float() for layer, maps in sorted((attend.maps or {}).items())},
        windows=attend.windows,
        gathered=sorted(set(attend.gathering)),
    )


def _kept(value: Any) -> Tensor:
    return hidden_of(value).detach().float().clone()
