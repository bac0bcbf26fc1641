"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from pellucid_model.training.recipe import Recipe


def learning_rate(step: int, recipe: Recipe) -> float:
    """Rate of step 0, 1, …, recipe.steps - 1.

    It grows linearly to the peak at step warmup - 1, and from step warmup on falls along half a cosine, which would
    reach its end at step `recipe.steps` (Loshchilov and Hutter 2017, without restarts).
    """
    peak, end = recipe.learning_rate, recipe.final_learning_rate
    if step < recipe.warmup:
        return peak * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
