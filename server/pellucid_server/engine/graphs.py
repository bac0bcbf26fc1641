"""Steps that can be recorded once and replayed: a CUDA graph launches all operators of a step in one go.

A replayed step reads and writes the same memory as the recorded one, so whoever uses it fills its inputs in place. On
devices without graphs, and where recording fails, the same step is called plainly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Computation = Callable[[], tuple[Tensor, Tensor]]
"""Computes hidden [B, d_model] and logits [B, V] from inputs that it knows where to find."""
Recorder = Callable[[Computation], Computation]
"""Makes of a computation one that gives the same, as fast as it can. RuntimeError where it cannot."""


def call_plainly(compute: Computation) -> Computation:
    """The recorder that records nothing."""
    return compute


class GraphRecorder:
    """Records CUDA graphs that share the memory of what they compute in between: one replays after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Computation) -> Computation:
        """The outputs are the same tensors at every call, valid until the next one."""
        self._warm(compute)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = compute()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return outputs

        return replay

    def _warm(self, compute: Computation) -> None:
        """Let libraries take what they need, beside the main stream, as recording wants it."""
        main, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            compute()
            compute()
        main.wait_stream(side)
