"""Which tokens run in the next step. Pure Python: no torch, no clock of its own, no input or output.

Comes in: sequences (`submit`), aborts (`abort`), the time. Goes out: a `Step`, then, once it has run, what it brought
for each sequence (`complete`). What a sequence's state is, sequence.py says; block_tables.py owns its blocks.

Sequences are ranked by the time of their arrival, put forward by ten seconds for each level of priority. The rank never
changes, and it decides everything: the best-ranked sequence always moves, so each one gets to its end.

Order of a step's side effects: expired sequences end; windows move; running sequences get tokens and blocks, decodes
first, then prompts in the order of rank (how much each one gets, prompt_shares.py says); where blocks run out the
running sequence with the worst rank gives all of its own back and waits again (what it computed may still be in the
cache then); then waiting sequences are admitted in the order of rank.
A waiting sequence of higher priority takes the place of running ones of lower priority and worse rank.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pellucid_server.engine.block_tables import BlockTables, Start
from pellucid_server.engine.ends import Expiries, finished
from pellucid_server.engine.groups import Groups
from pellucid_server.engine.messages import Finished, Progress, Submit, TokenLogprob
from pellucid_server.engine.multi_step import steps_in_a_row
from pellucid_server.engine.prompt_shares import PromptShares
from pellucid_server.engine.sequence import AGEING_SECONDS, NONE_SCORED, Chunk, Sampled, SequenceState, Step
from pellucid_server.engine.speculation import Speculation
from pellucid_server.engine.step_plan import StepPlan
from pellucid_server.kv.blocks import BlockPool


class Scheduler:
    """Continuous batching over a block pool.

    max_running      sequences that may hold blocks at once
    max_step_tokens  token budget of a step, at least max_running, so that every decode moves in every step
    native_window    the widest window of a model all of whose layers have one, so that older blocks can go; else 0
    widest_window    the widest one that any layer has; else 0
    prefix_cache     whether computed blocks are kept for sequences that begin alike
    draft_tokens     how many tokens of a sequence a step may guess; 0: none
    """

    def __init__(
        self,
        pool: BlockPool,
        max_running: int,
        max_step_tokens: int,
        native_window: int = 0,
        widest_window: int = 0,
        *,
        prefix_cache: bool = True,
        draft_tokens: int = 0,
    ) -> None:
        if max_step_tokens < max_running:
            raise ValueError(f"max_step_tokens = {max_step_tokens} must be at least max_running = {max_running}")
        self.pool = pool
        self.tables = BlockTables(pool, native_window, widest_window, prefix_cache=prefix_cache)
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.running: list[SequenceState] = []
        """In the order of rank."""
        self.waiting: list[SequenceState] = []
        """In the order of rank; the next to be admitted is the last, so that taking it is cheap."""
        self.preemptions = 0
        self.speculation = Speculation(draft_tokens)
        self._by_key: dict[int, SequenceState] = {}
        self._groups = Groups()
        self._arrivals = 0
        self._expiries = Expiries()
        self._shares = PromptShares()

    def submit(self, request: Submit, now: float = 0.0) -> None:
        """Queue a sequence. Raises ValueError where the whole pool could not hold its tokens or their window."""
        length, blocks = len(request.prompt) + len(request.generated), self.pool.count
        if not request.prompt or self.tables.blocks_needed(request, length) > blocks:
            raise ValueError(
                f"sequence {request.key} can never run: {length} tokens in {blocks} blocks of {self.pool.block_size}"
            )
        fits = self.tables.blocks_needed(request, request.max_length) <= blocks
        rank = (now - AGEING_SECONDS * request.priority, self._arrivals)
        max_length = request.max_length if fits else self.pool.token_capacity
        sequence = SequenceState.of(request, rank, max_length, self.tables.new_chain(request))
        self._arrivals += 1
        self._by_key[request.key] = sequence
        self._groups.add(sequence)
        insort(self.waiting, sequence, key=_last_first)
        self._expiries.add(request, self._by_key)

    def abort(self, key: int) -> bool:
        """Forget a sequence in whatever state; False where it is unknown."""
        sequence = self._by_key.get(key)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    @property
    def idle(self) -> bool:
        return not self._by_key

    @property
    def next_expiry(self) -> float:
        """No deadline or time limit passes before this moment."""
        return self._expiries.next_at

    def schedule(self, now: float, most_repeats: int = 1) -> Step:
        """Choose the next step's chunks and give them their blocks.

        most_repeats  how often the caller would run it in a row
        """
        expired = self._expire(now)
        plan = StepPlan(self.max_step_tokens)
        decodes: list[SequenceState] = []
        prefills: list[SequenceState] = []
        for sequence in self.running:
            self.tables.move_window(sequence)
            (decodes if sequence.pending == 1 else prefills).append(sequence)
        for sequence in decodes:
            self._plan(sequence, plan, plan.budget)
        newcomers, first = self._newcomers()
        pending = [*(sequence.pending for sequence in prefills), *first]
        shares = self._shares.divide(plan.budget, len(prefills) + newcomers, pending)
        for sequence in itertools.chain(prefills, self._admitted(plan)):
            self._plan(sequence, plan, shares.next(sequence.pending, plan.budget))
        for chunk in plan.chunks.values():
            if chunk.sequence.first_scheduled_at is None:
                chunk.sequence.first_scheduled_at = now
        chunks = self.speculation.extend(plan.chunks.values(), plan.budget, self.tables)
        decoded = sum([chunk.decodes for chunk in chunks])
        alone = bool(expired) or self.speculation.is_on  # who has expired is told with this step
        repeats = 1 if alone or decoded < len(chunks) else steps_in_a_row(chunks, self.tables, most_repeats)
        return Step(chunks, expired, plan.copies, decoded, repeats)

    def complete(
        self,
        step: Step,
        sampled: Sequence[Sequence[Sampled]],
        prompt_logprobs: Mapping[int, list[TokenLogprob] | None] | None = None,
    ) -> list[Progress]:
        """Book a step that has run.

        sampled          for each chunk that samples, one for its last token and one for each token of its draft that
                         was right: the next one is where it was wrong, or what follows it; or one for each time the
                         step was run
        prompt_logprobs  by key, one for each of a chunk's `scored` rows; None: they were not finite
        """
        tokens = iter(sampled)
        progress: list[Progress] = []
        for chunk in step.chunks:
            outcomes: Sequence[Sampled | None] = next(tokens) if chunk.samples else [None]
            if chunk.scored:
                scores = (prompt_logprobs or {}).get(chunk.sequence.request.key, [])
                if scores is None:
                    outcomes = [Sampled(None)]
                else:
                    chunk.sequence.prompt_logprobs += scores
                    chunk.sequence.unscored -= len(chunk.scored)
            if (brought := self._book(chunk, outcomes)) is not None:
                progress.append(brought)
            if step.repeats > 1 or chunk.draft:
                self.tables.trim(chunk.sequence)
        return progress

    def check_integrity(self) -> None:
        """Raise RuntimeError where blocks are lost or miscounted, or a sequence is in two places."""
        self.pool.check_integrity(sequence.held_blocks for sequence in self._by_key.values())
        places = sorted(sequence.request.key for sequence in self.running + self.waiting)
        if places != sorted(self._by_key):
            raise RuntimeError(f"sequences {sorted(self._by_key)} are queued as {places}")
        if any(sequence.blocks for sequence in self.waiting):
            raise RuntimeError("a waiting sequence holds blocks")

    def _plan(self, sequence: SequenceState, plan: StepPlan, most: int) -> None:
        """Add at most `most` tokens of a running sequence to the step.

        A chunk shrinks to the room there is rather than push others out: they go only where there is none for one
        token, and the sequence itself goes where it has the worst rank.
        """
        if plan.budget <= 0 or sequence in plan.preempted:
            return
        start, pending, count = sequence.computed, sequence.pending, 1
        if pending > 1 or not self.tables.has_place(sequence):
            while (room := self.tables.room(sequence)) < 1:
                victim = self.running[-1]
                self._preempt(victim, plan)
                if victim is sequence:
                    return
            count = min(pending, most, plan.budget, room)
            plan.copies += self.tables.grow(sequence, count)
        samples = start + count + sequence.offset == len(sequence.tokens) and sequence.request.max_new_tokens > 0
        scored = sequence.places_to_score(start, count) if sequence.unscored else NONE_SCORED
        plan.add(Chunk(sequence, start, count, samples, scored))

    def _admitted(self, plan: StepPlan) -> Iterator[SequenceState]:
        """Waiting sequences that start now, the best-ranked first. Each is planned before the next one is looked for.

        One starts only where all it has to compute fits, so that it is not pushed out at once. It is not overtaken by
        smaller ones behind it: it would wait for ever.
        """
        while plan.budget > 0 and (sequence := self._next_waiting()) is not None and sequence not in plan.preempted:
            self._make_way(sequence, plan)
            start = self._find_start(sequence)
            if not self._fits(sequence, start):
                return
            self.waiting.remove(sequence)
            self.tables.begin(sequence, start)
            insort(self.running, sequence, key=_rank)
            yield sequence
            if sequence not in self.running:
                return

    def _newcomers(self) -> tuple[int, list[int]]:
        """Waiting sequences that could join this step, about, and what the next of them has to compute."""
        places = min(len(self.waiting), self.max_running - len(self.running))
        sequence = self._next_waiting() if places > 0 else None
        if sequence is None or not self._fits(sequence, start := self._find_start(sequence)):
            return 0, []
        return places, [sequence.view_length - start.computed]

    def _next_waiting(self) -> SequenceState | None:
        """The best-ranked sequence that need not wait for another of its group to compute their common prompt."""
        return next((sequence for sequence in reversed(self.waiting) if not self._groups.awaits(sequence)), None)

    def _find_start(self, sequence: SequenceState) -> Start:
        self.tables.move_window(sequence)
        return self.tables.find_start(sequence, self._groups.siblings(sequence))

    def _fits(self, sequence: SequenceState, start: Start) -> bool:
        return len(self.running) < self.max_running and self.tables.fits(sequence, start)

    def _make_way(self, sequence: SequenceState, plan: StepPlan) -> None:
        """Push out running sequences of lower priority and worse rank, if that lets a waiting one start."""
        victims = [
            other
            for other in self.running
            if other.request.priority < sequence.request.priority and _rank(other) > _rank(sequence)
        ]
        if not victims:
            return
        held = Counter(block for victim in victims for block in victim.held_blocks)
        gained = sum(count == self.pool.references(block) for block, count in held.items())
        if self.tables.missing_blocks(sequence, self._find_start(sequence)) > self.pool.available + gained:
            return
        while victims and not self._fits(sequence, self._find_start(sequence)):
            self._preempt(victims.pop(), plan)

    def _preempt(self, sequence: SequenceState, plan: StepPlan) -> None:
        """Take all blocks away; the sequence waits again, at its old rank."""
        plan.drop(sequence)
        self.tables.release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=_last_first)

    def _expire(self, now: float) -> list[Progress]:
        expired = []
        for key, kind in self._expiries.due(now):
            if (sequence := self._by_key.get(key)) is not None:
                self._remove(sequence)
                expired.append(sequence.progress([], Finished(kind)))
        return expired

    def _remove(self, sequence: SequenceState) -> None:
        del self._by_key[sequence.request.key]
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._groups.remove(sequence)
        self.tables.release(sequence)

    def _book(self, chunk: Chunk, outcomes: Sequence[Sampled | None]) -> Progress | None:
        """Book a chunk's tokens as if each had had a step of its own: one of a draft is computed once it has come true.

        outcomes  None: nothing was sampled. None but the last may end the sequence.

        -> what there is to report
        """
        sequence, last = chunk.sequence, outcomes[-1]
        tokens = [outcome.token for outcome in outcomes if outcome is not None and outcome.token is not None]
        before = len(tokens) if last is None or last.token is None else len(tokens) - 1
        sequence.tokens += tokens[:before]
        sequence.computed = chunk.start + chunk.count + len(outcomes) - 1
        self.tables.publish(sequence)
        end = finished(sequence, last)
        sequence.tokens += tokens[before:]
        if chunk.draft:
            self.speculation.judge(chunk, len(outcomes) - 1)
        if not tokens and end is None:
            return None
        logprobs: list[TokenLogprob] = []
        if sequence.request.output_logprobs is not None:
            logprobs = [each.logprob for each in outcomes if each is not None and each.logprob is not None]
        progress = sequence.progress(tokens, end, logprobs)
        if end is not None:
            if end.kind == "non_finite":
                self.tables.withdraw(sequence)
            self._remove(sequence)
        return progress


def _rank(sequence: SequenceState) -> tuple[float, int]:
    return sequence.rank


def _last_first(sequence: SequenceState) -> tuple[float, int]:
    return -sequence.rank[0], -sequence.rank[1]
