"""Runs steps: from chunks to logits.

Order of a step's side effects: blocks are copied; the forward pass writes keys and values and makes logits for the rows
that need a next token; then, a few at a time, for those whose prompt tokens are scored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pellucid_model.contract import DecoderModel
from pellucid_model.kernels import Kernels
from pellucid_model.kernels.plan import StepSampling, StepsRun
from pellucid_server.engine.cache import KVCache
from pellucid_server.engine.forward import Forward, ModuleForward, PlannedForward
from pellucid_server.engine.ragged import StepRows
from pellucid_server.engine.sequence import Chunk, Step

SCORED_ROWS = 64
"""Rows of logits that are held at once while a prompt is scored: a whole prompt's would fill the memory."""

Scorer = Callable[[Chunk, int, Tensor], None]
"""Is shown a chunk, the first of the sequence's tokens that some of its `scored` rows foretell, and these rows' logits
[rows, V] float32 on the CPU."""


class ModelRunner:
    """Runs steps. Owns the model and its cache, knows nothing of requests."""

    def __init__(
        self,
        model: DecoderModel,
        kernels: Kernels,
        cache: KVCache,
        device: torch.device,
        forward: Forward | None = None,
    ) -> None:
        """forward: how the model is run; None: by calling it."""
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._device = device
        self._forward = forward or ModuleForward(model, kernels, cache, device)

    def around(self, wrap: Callable[[DecoderModel], DecoderModel]) -> ModelRunner:
        """A runner over the same cache and operators that calls the model wrapped, so that somebody can look on."""
        return ModelRunner(wrap(self._model), self._kernels, self._cache, self._device)

    @torch.inference_mode()
    def run(self, step: Step, score: Scorer | None = None) -> Tensor:
        """Compute the step's chunks -> logits [R, V] float32 where the model runs, each chunk's `sampled_rows`.

        They are valid until the next step.

        score  is shown the logits of every chunk's `scored` rows
        """
        if step.copies:
            self._cache.copy_blocks(step.copies)
        logits = self._forward.run(StepRows.of(step)).float()
        if score is not None and any(chunk.scored for chunk in step.chunks):
            self._score(step, score)
        return logits

    @property
    def runs_steps(self) -> bool:
        """Whether it can run several steps in a row by itself."""
        return isinstance(self._forward, PlannedForward)

    @torch.inference_mode()
    def run_steps(self, step: Step, sampling: StepSampling) -> StepsRun:
        """Run a step again and again, as `sampling` says; see PlannedForward.run_steps."""
        if not isinstance(self._forward, PlannedForward):
            raise ValueError("this model runs single steps only")
        if step.copies:
            self._cache.copy_blocks(step.copies)
        return self._forward.run_steps(StepRows.of(step), sampling)

    def _score(self, step: Step, score: Scorer) -> None:
        """Show the logits of scored rows."""
        first_row = 0
        for chunk in step.chunks:
            for begin in range(0, len(chunk.scored), SCORED_ROWS):
                places = chunk.scored[begin : begin + SCORED_ROWS]
                row = first_row + places.start - chunk.start
                rows = torch.arange(row, row + len(places), device=self._device)
                score(chunk, chunk.first_target + begin, self._forward.more_logits(rows).float().cpu())
            first_row += chunk.rows
