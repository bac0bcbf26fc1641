"""How much of a step each prompt gets, so that they hold nobody up.

Comes in: what decodes leave of a step's budget, and what the prompts have to compute. Goes out: the most that each one
gets, in the order of rank. The first one gets what there is, less a small share for those behind it. Long ones hold
back while a short one is there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

QUANTUM_SHARE = 4
"""A quarter of what decodes leave of the budget is kept for prompts behind the first one, in equal parts."""
ROWS_BESIDE_SHORT = 32
"""The most that a longer prompt gets in a step that a short one could be through with, so that the short one's first
token does not wait for its rows. At most every other step is like that: short ones without end do not stop it."""


@dataclass(slots=True)
class StepShares:
    """The prompts of one step."""

    _behind: int
    """Prompts that have not had theirs."""
    _quantum: int
    """Kept for each of them."""
    _longest: int
    """The most for those that have more to compute than that."""

    def next(self, pending: int, budget: int) -> int:
        """The most that the next prompt gets, which has `pending` tokens to compute, of the `budget` that is left."""
        self._behind -= 1
        most = max(1, budget - self._quantum * max(0, self._behind))
        return most if pending <= self._quantum else min(most, self._longest)


class PromptShares:
    """Divides one step after the other."""

    def __init__(self) -> None:
        self._held_back = False
        """Whether long prompts made way for a short one in the last step."""

    def divide(self, budget: int, prompts: int, pending: Collection[int]) -> StepShares:
        """The shares of the next step's prompts.

        pending  tokens to compute, of each prompt that runs, and of the next one to join
        """
        quantum = max(1, budget // QUANTUM_SHARE // max(1, prompts - 1))
        self._held_back = not self._held_back and min(pending, default=quantum + 1) <= quantum
        return StepShares(prompts, quantum, ROWS_BESIDE_SHORT if self._held_back else budget)
