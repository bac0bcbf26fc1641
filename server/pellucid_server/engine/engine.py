"""The step loop: messages in, one step, messages out. One thread, no locks.

Order of side effects in one turn: take what has arrived (submissions, aborts) and requests whose constraints have been
compiled meanwhile, plan, run, sample, book, report. A request therefore joins or leaves between two steps, and an abort
takes effect before the next one. Reports of quick steps that only decode go together: what takes longer waits for none,
nor do first tokens and ends.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Literal, NoReturn

from pellucid_model.checkpoint_kind import companions
from pellucid_model.kernels import library
from pellucid_model.tokenizers import load_tokenizer
from pellucid_server.engine.choosing import Chooser
from pellucid_server.engine.connection import EngineConnection
from pellucid_server.engine.constraint_states import Constraints, Grammar
from pellucid_server.engine.execution import Executor
from pellucid_server.engine.loading import Loaded
from pellucid_server.engine.memory import GpuMemory
from pellucid_server.engine.messages import (
    Abort,
    Configure,
    Finished,
    FinishKind,
    Ping,
    Progress,
    Sampling,
    Stats,
    StepDone,
    Submit,
    ToEngine,
)
from pellucid_server.engine.multi_step import MOST_STEPS, Interruption
from pellucid_server.engine.scheduler import Scheduler
from pellucid_server.engine.sequence import Step
from pellucid_server.logs import LOGGER
from pellucid_server.pace import message_gap

Phase = Literal["prefill", "decode", "mixed", "idle"]


class Engine:
    """Runs one model for one frontend."""

    def __init__(self, loaded: Loaded, configure: Configure) -> None:
        self._loaded = loaded
        self._configure = configure
        self._scheduler = self._new_scheduler()
        vocab_size = configure.tokenizer_size or loaded.ready.vocab_size
        self._constraints = Constraints(lambda: load_tokenizer(companions(Path(configure.checkpoint))), vocab_size)
        chooser = Chooser(vocab_size, self._constraints, library.load_library(), library.threads())
        self._executor = Executor(loaded.runner, chooser)
        self._preparing: dict[int, tuple[Submit, Future[Grammar]]] = {}
        """By key: requests whose constraints are being compiled."""
        self._gpu_memory = GpuMemory(on_gpu=loaded.ready.device != "cpu")
        self._prefill_tokens = 0
        self._reported_at = 0.0

    def warm_up(self) -> float:
        """Run the largest prompt step and a decode once, so that the first request meets a warm engine.

        Returns the seconds that the longer one took.
        """
        length = min(self._loaded.ready.max_step_tokens, self._loaded.pool.token_capacity - 1)
        length = max(1, min(length, self._loaded.ready.context_length - 1))
        scheduler = self._new_scheduler()
        greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
        scheduler.submit(
            Submit(
                key=0,
                prompt=[0] * length,
                sampling=greedy,
                max_new_tokens=2,
                min_new_tokens=0,
                eos_ids=[],
                stop_ids=[],
                max_length=length + 2,
                cache_write=False,
            )
        )
        longest = 0.0
        while not scheduler.idle:
            began = time.monotonic()
            step = scheduler.schedule(0.0)
            outcome = self._executor.execute(step)
            scheduler.complete(step, outcome.sampled, outcome.scores)
            longest = max(longest, time.monotonic() - began)
        return longest

    def serve(self, connection: EngineConnection) -> NoReturn:
        """Step for ever. Raises ConnectionClosed when the frontend is gone."""
        while True:
            resting = self._scheduler.idle and not self._preparing
            self._take(connection.receive(None if resting else 0), connection)
            self._take_prepared(connection)
            step = self._scheduler.schedule(time.monotonic(), self._most_repeats)
            if step.chunks or step.expired:
                self._run(step, connection)

    def _take(self, messages: list[ToEngine], connection: EngineConnection) -> None:
        asked = False
        for message in messages:
            if isinstance(message, Submit) and message.constraint is not None:
                self._preparing[message.key] = (message, self._constraints.prepare(message.constraint))
            elif isinstance(message, Submit):
                self._submit(message, connection)
            elif isinstance(message, Abort):
                asked |= self._preparing.pop(message.key, None) is not None or self._scheduler.abort(message.key)
            elif isinstance(message, Ping):
                asked = True
        if asked and self._scheduler.idle:
            connection.send(StepDone([], self._stats(None, 0.0), [time.monotonic()]))

    def _take_prepared(self, connection: EngineConnection) -> None:
        """Queue the requests whose constraints are compiled by now. With nothing else to do, wait for the first one."""
        if self._scheduler.idle and self._preparing:
            connection.flush()
            wait([next(iter(self._preparing.values()))[1]])
        for key, (request, prepared) in list(self._preparing.items()):
            if not prepared.done():
                continue
            del self._preparing[key]
            if (error := prepared.exception()) is None:
                self._submit(request, connection)
            else:
                LOGGER.warning("a request's constraint cannot be followed: %s", error)
                self._end(key, "no_token", connection)

    def _submit(self, request: Submit, connection: EngineConnection) -> None:
        """Queue a sequence. One that was begun under a larger cache, before a restart, may not fit any more."""
        try:
            self._scheduler.submit(request, time.monotonic())
        except ValueError:
            self._end(request.key, "context_full", connection)

    def _end(self, key: int, kind: FinishKind, connection: EngineConnection) -> None:
        """Tell the end of a request that has never run."""
        end = Progress(key, [], Finished(kind), None, 0)
        connection.send(StepDone([end], self._stats(None, 0.0), [time.monotonic()]))

    def _run(self, step: Step, connection: EngineConnection) -> None:
        """Run a step, book and report it."""
        phase = _phase(len(step.chunks), step.decodes)
        if phase != "decode":
            connection.flush()
        began = time.monotonic()
        streams = sum([chunk.sequence.request.is_stream for chunk in step.chunks])
        report_at = max(began, self._reported_at + message_gap(streams))
        until = min(report_at, self._scheduler.next_expiry)
        outcome = self._executor.execute(step, Interruption(until, connection))
        ended = outcome.ended[-1]
        self._prefill_tokens += sum([chunk.count for chunk in step.chunks]) - step.decodes
        progress = step.expired + self._scheduler.complete(step, outcome.sampled, outcome.scores)
        report = StepDone(progress, self._stats(step, outcome.ended[0] - began, phase), outcome.ended)
        can_wait = phase == "decode" and not _is_urgent(step, progress)
        if can_wait and ended < until:
            connection.hold(report)
            return
        connection.post(report) if can_wait else connection.send(report)
        self._reported_at = ended

    @property
    def _most_repeats(self) -> int:
        """How often a step may be run in a row; not while constraints of requests that want to join are compiled."""
        return MOST_STEPS if self._loaded.runner.runs_steps and not self._preparing else 1

    def _new_scheduler(self) -> Scheduler:
        configure = self._configure
        return Scheduler(
            self._loaded.pool,
            configure.max_running,
            self._loaded.ready.max_step_tokens,
            self._loaded.ready.native_window,
            self._loaded.ready.widest_window,
            prefix_cache=configure.prefix_cache,
            draft_tokens=configure.speculative_tokens,
        )

    def _stats(self, step: Step | None, seconds: float, phase: Phase = "idle") -> Stats:
        scheduler, pool = self._scheduler, self._loaded.pool
        gpu_allocated, gpu_reserved = self._gpu_memory.read(time.monotonic())
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            running_tokens=sum([sequence.computed for sequence in scheduler.running]),
            waiting_tokens=sum([len(sequence.tokens) for sequence in scheduler.waiting]),
            free_blocks=pool.free,
            used_blocks=pool.used,
            prefill_tokens_total=self._prefill_tokens,
            preemptions_total=scheduler.preemptions,
            step_sequences=len(step.chunks) if step else 0,
            step_tokens=step.tokens if step else 0,
            step_seconds=seconds,
            step_phase=phase,
            gpu_allocated_bytes=gpu_allocated,
            gpu_reserved_bytes=gpu_reserved,
            cached_blocks=pool.cached,
            prefix_queried_tokens_total=scheduler.tables.queried_tokens,
            prefix_hit_tokens_total=scheduler.tables.hit_tokens,
            drafted_tokens_total=scheduler.speculation.drafted,
            accepted_tokens_total=scheduler.speculation.accepted,
        )


def _phase(sequences: int, decoded: int) -> Phase:
    if sequences == 0:
        return "idle"
    if decoded == 0:
        return "prefill"
    return "decode" if decoded == sequences else "mixed"


def _is_urgent(step: Step, progress: list[Progress]) -> bool:
    """Whether somebody waits for what a step has brought, or may end by it."""
    if any(one.finished is not None for one in progress):
        return True
    sequences = [chunk.sequence for chunk in step.chunks]
    return any(each.request.at_once or (each.watched and each.tokens[-1] in each.watched) for each in sequences)
