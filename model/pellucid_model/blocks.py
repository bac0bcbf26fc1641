"""Finds the blocks of a model, whoever wrote it, and what a hook on one of them hands out.

Nearly every Transformer keeps its blocks in one nn.ModuleList; of several lists it is the one with most parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks in order; none where it keeps them otherwise."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) > 0]
    if not lists:
        return []
    largest = max(lists, key=lambda part: sum(weight.numel() for weight in part.parameters()))
    return list(largest)


def checkpoint_blocks(blocks: Sequence[nn.Module]) -> None:
    """Let every block keep its inputs alone for the backward pass, and compute the rest again (Chen et al. 2016).

    Gradients stay the same. Names of parameters do too, since the blocks' own forward functions are replaced.
    """
    for block in blocks:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return wrapped


def hidden_of(output: Any) -> Tensor:
    """What a block hands to the next one, as [T, d_model]: a module may return a tuple, or keep a batch of one."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden.reshape(-1, hidden.shape[-1])
