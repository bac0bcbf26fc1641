"""When a sequence ends, and why: by its tokens, its limits, or the time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from pellucid_server.engine.messages import Finished, FinishKind, Submit
from pellucid_server.engine.sequence import Sampled, SequenceState


def finished(sequence: SequenceState, sampled: Sampled | None) -> Finished | None:
    """Whether the sequence ends with what was sampled for it last. Tokens that end it win over limits they reach.

    sampled  None: nothing was, in this step
    """
    request = sequence.request
    if sampled is None:
        done = request.max_new_tokens == 0 and sequence.computed + sequence.offset == len(sequence.tokens)
        return Finished("max_new_tokens") if done else None
    token = sampled.token
    if token is None:
        return Finished(sampled.end or "non_finite")
    if token in request.eos_ids:
        return Finished("eos", token)
    if token in request.stop_ids:
        return Finished("stop_token", token)
    if sampled.end is not None:
        return Finished(sampled.end)
    if sequence.output_count + 1 >= request.max_new_tokens:
        return Finished("max_new_tokens")
    if len(sequence.tokens) + 1 >= sequence.max_length:
        return Finished("context_full")
    return None


class Expiries:
    """Deadlines and time limits, the next one first. Of sequences that have ended it forgets most by itself."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, FinishKind]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Submit, live: Collection[int]) -> None:
        """Note a request's deadline and time limit. `live` holds the keys of all sequences that have not ended."""
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.key, "deadline"))
        if request.time_limit_at is not None:
            heapq.heappush(self._heap, (request.time_limit_at, request.key, "time_limit"))
        if len(self._heap) > 64 + 4 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)

    @property
    def next_at(self) -> float:
        """The first moment at which one may expire; infinite where none does."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> list[tuple[int, FinishKind]]:
        """Keys that expire by `now`, each once, and how: of a deadline and a time limit, the deadline.

        Some may be of sequences that have ended.
        """
        ends: dict[int, FinishKind] = {}
        while self._heap and self._heap[0][0] <= now:
            _, key, kind = heapq.heappop(self._heap)
            if kind == "deadline" or key not in ends:
                ends[key] = kind
        return list(ends.items())
