"""Chooses the next tokens of every sequence that is due in a step, with all that its request says about it.

In: the chunks that sample, before the step's forward pass (`begin`), then their logits (`choose`). Out: a Sampled for
each, or several where a draft came true. What is kept of a sequence from step to step, its history and its place in its
constraint, follows from its request and tokens alone, so a sequence that is preempted or carried over to a new engine
goes on as if nothing had been.

While the model runs, the constraints' bits are computed beside it.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor

from pellucid_model.kernels.plan import StepSampling
from pellucid_server.engine.adjustments import Adjustments
from pellucid_server.engine.constraint_states import Constraints, ConstraintState
from pellucid_server.engine.logprobs import Logprobs
from pellucid_server.engine.messages import FinishKind, TokenLogprob
from pellucid_server.engine.multi_step import Interruption
from pellucid_server.engine.sampler import Sampler, SamplerRow, pack_rows
from pellucid_server.engine.sampler_device import DeviceSampler
from pellucid_server.engine.sequence import Chunk, Sampled, SequenceState
from pellucid_server.logs import LOGGER


@dataclass(slots=True)
class _Memory:
    """What is kept of a sequence."""

    adjustments: Adjustments | None
    constraint: ConstraintState | None
    row: SamplerRow | None = None
    """The sampler's row, once nothing but its place in the output will change."""


class Chooser:
    """Chooses tokens. `vocab_size`: ids from here on are never chosen; the rest as for Sampler."""

    def __init__(
        self, vocab_size: int, constraints: Constraints, library: ctypes.CDLL | None = None, threads: int = 1
    ) -> None:
        self.constraints = constraints
        self.logprobs = Logprobs(vocab_size, library, threads)
        self._sampler = Sampler(vocab_size, library, threads)
        self._device_sampler = DeviceSampler(vocab_size, self._sampler)
        self._vocab_size = vocab_size
        self._memories: WeakKeyDictionary[SequenceState, _Memory] = WeakKeyDictionary()
        self._due: list[tuple[SequenceState, _Memory]] = []
        """Of the step that has begun."""
        self._computing: Future[None] | None = None

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Catch up with the sequences' tokens, and compute beside the caller which ids their constraints permit."""
        constrained = []
        self._due = [(chunk.sequence, self._memory(chunk.sequence)) for chunk in chunks]
        for sequence, memory in self._due:
            if memory.adjustments is not None:
                memory.adjustments.follow(sequence.tokens)
            if memory.constraint is not None:
                memory.constraint.follow(sequence.tokens)
                constrained.append(memory.constraint)
        self._computing = self.constraints.compute(constrained) if constrained else None

    def choose(self, chunks: Sequence[Chunk], logits: Tensor) -> list[list[Sampled]]:
        """What comes of each chunk that `begin` was told of, in the same order: one Sampled at the least.

        logits  [R, V], float32, where the model runs: each chunk's `sampled_rows`

        The token behind a draft's token counts only where that one was right. So the chunks' first rows are sampled
        together, then the second ones of those whose draft goes on being right, and so on.
        """
        if self._computing is not None:
            self._computing.result()
        whose, self._due = self._due, []
        if not chunks:
            return []
        if len(chunks) == logits.shape[0]:  # nobody has a draft
            return [[one] for one in self._choose(whose, logits, 0)]
        begins = list(itertools.accumulate((chunk.sampled_rows for chunk in chunks), initial=0))
        chosen: list[list[Sampled]] = [[] for _ in chunks]
        due, ahead = list(range(len(chunks))), 0
        while due:
            rows = logits[[begins[index] + ahead for index in due]]
            sampled = self._choose([whose[index] for index in due], rows, ahead)
            for index, one in zip(due, sampled, strict=True):
                chosen[index].append(one)
            due = [i for i in due if self._goes_on(chunks[i], whose[i][1], ahead, chosen[i][ahead])]
            ahead += 1
        return chosen

    def repeatable(self, most: int, interruption: Interruption) -> StepSampling | None:
        """How the chunks that `begin` was told of sample several times in a row.

        None where what a sequence may choose, or what is told of it, depends on more than the logits and its place.
        """
        if any(memory.row is None or s.request.output_logprobs is not None for s, memory in self._due):
            return None
        rows, end_ids, end_begins = [], array("q"), array("i", [0])
        for sequence, memory in self._due:
            rows.append(_row(sequence, memory, 0))
            end_ids.extend(sequence.request.eos_ids)
            end_ids.extend(sequence.request.stop_ids)
            end_ids.extend(sequence.request.watched_ids)
            end_begins.append(len(end_ids))
        return StepSampling(
            most=most,
            vocab_size=self._vocab_size,
            settings=pack_rows(rows, array("i")),
            end_ids=end_ids,
            end_begins=end_begins,
            until=interruption.until,
            descriptor=interruption.descriptor,
            outgoing=interruption.outgoing,
        )

    def chosen(self, tokens: array[int], logits: Tensor) -> list[list[Sampled]]:
        """What came of such steps: tokens [steps * S], and the logits [S, V] of the last step."""
        whose, self._due = self._due, []
        chosen = []
        for row, (_, memory) in enumerate(whose):
            own = [Sampled(token) for token in tokens[row :: len(whose)]]
            if tokens[row - len(whose)] < 0:
                own[-1] = Sampled(None, end=self._end_without_token(memory, logits[row, : self._vocab_size]))
            chosen.append(own)
        return chosen

    def _goes_on(self, chunk: Chunk, memory: _Memory, place: int, sampled: Sampled) -> bool:
        """Whether the chunk's draft was right at this place; then the sequence's state moves on to the next row."""
        if sampled.end is not None or chunk.draft[place : place + 1] != (sampled.token,):
            return False
        if memory.adjustments is not None:
            memory.adjustments.accept(chunk.draft[place])
        if memory.constraint is not None:
            memory.constraint.compute()
        return True

    def _choose(self, due: Sequence[tuple[SequenceState, _Memory]], logits: Tensor, ahead: int) -> list[Sampled]:
        """One Sampled for each sequence, which has `ahead` tokens more than it has booked."""
        sampler = self._sampler if logits.device.type == "cpu" else self._device_sampler
        tokens = sampler.sample(logits, [_row(sequence, memory, ahead) for sequence, memory in due])
        logprobs = self._read([sequence for sequence, _ in due], tokens, logits)
        return [
            Sampled(None, end=self._end_without_token(memory, logits[row, : self._vocab_size]))
            if token is None
            else Sampled(token, logprobs.get(row), _end_with(sequence, memory, token))
            for row, ((sequence, memory), token) in enumerate(zip(due, tokens, strict=True))
        ]

    def _memory(self, sequence: SequenceState) -> _Memory:
        memory = self._memories.get(sequence)
        if memory is None:
            memory = self._memories[sequence] = self._remember(sequence)
        return memory

    def _remember(self, sequence: SequenceState) -> _Memory:
        request = sequence.request
        adjustments = Adjustments.of(request.sampling, request.prompt)
        if request.constraint is None:
            return _Memory(adjustments, None)
        end_ids = (*request.eos_ids, *request.stop_ids)
        return _Memory(adjustments, self.constraints.new_state(request.constraint, len(request.prompt), end_ids))

    def _end_without_token(self, memory: _Memory, row: Tensor) -> FinishKind:
        """Why no token could be chosen by `row` [V]: there is no distribution, or the request leaves no id of it."""
        constraint = memory.constraint
        if not bool((row < float("inf")).all() and (row > float("-inf")).any()):
            return "non_finite"
        if constraint is not None and constraint.accepting:
            return "constraint_done"
        fault = constraint.fault if constraint is not None else ""
        LOGGER.warning("a sequence ends, because its request leaves no token that may follow%s", fault and f": {fault}")
        return "no_token"

    def _read(
        self, sequences: Sequence[SequenceState], tokens: Sequence[int | None], logits: Tensor
    ) -> dict[int, TokenLogprob | None]:
        """The tokens' log-probabilities, by row, where they are asked for."""
        asked = [
            (row, token, sequence.request.output_logprobs)
            for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
            if sequence.request.output_logprobs is not None and token is not None
        ]
        if not asked:
            return {}
        rows, ids, wishes = (list(column) for column in zip(*asked, strict=True))
        return dict(zip(rows, self.logprobs.read(logits[rows].cpu(), ids, wishes), strict=True))


def _row(sequence: SequenceState, memory: _Memory, ahead: int) -> SamplerRow:
    """The sampler's row for the token that is `ahead` of the next one."""
    place = sequence.output_count + ahead
    if memory.row is not None:
        memory.row.output_index = place
        return memory.row
    request, constraint = sequence.request, memory.constraint
    row = SamplerRow(
        sampling=request.sampling,
        banned=tuple(sequence.banned_ids(ahead)),
        output_index=place,
        sequence_index=request.sequence_index,
        adjustments=memory.adjustments,
        permitted=constraint.permitted if constraint is not None else None,
    )
    if row.is_constant:
        memory.row = row
    return row


def _end_with(sequence: SequenceState, memory: _Memory, token: int) -> FinishKind | None:
    """Whether the constraint ends the output with this token, which it takes note of."""
    constraint, request = memory.constraint, sequence.request
    if constraint is None or token in request.eos_ids or token in request.stop_ids:
        return None
    constraint.accept(token)
    return "constraint_done" if constraint.exhausted and constraint.accepting else None
