"""The step loop: messages in, one step, messages out. One thread, no locks.

Order of side effects in one turn: take what has arrived (submissions, aborts), plan, run, sample, book, report. A
request therefore joins or leaves between two steps, and an abort takes effect before the next one.
"""

from __future__ import annotations

import time
from typing import Literal, NoReturn

from pellucid_model.kernels import library
from pellucid_server.engine.connection import EngineConnection
from pellucid_server.engine.loading import Loaded
from pellucid_server.engine.memory import GpuMemory
from pellucid_server.engine.messages import (
    Abort,
    Configure,
    Finished,
    Ping,
    Progress,
    Sampling,
    Stats,
    StepDone,
    Submit,
    ToEngine,
)
from pellucid_server.engine.sampler import Sampler, SamplerRow
from pellucid_server.engine.scheduler import Scheduler, Step

Phase = Literal["prefill", "decode", "mixed", "idle"]


class Engine:
    """Runs one model for one frontend."""

    def __init__(self, loaded: Loaded, configure: Configure) -> None:
        self._loaded = loaded
        self._configure = configure
        self._scheduler = self._new_scheduler()
        self._sampler = Sampler(
            configure.tokenizer_size or loaded.ready.vocab_size, library.load_library(), library.threads()
        )
        self._gpu_memory = GpuMemory(on_gpu=loaded.ready.device != "cpu")
        self._steps = 0
        self._prefill_tokens = 0
        self._generated_tokens = 0

    def warm_up(self) -> float:
        """Run the largest prompt step and a decode once, so that the first request meets a warm engine.

        Returns the seconds that the longer one took.
        """
        length = min(self._configure.max_step_tokens, self._loaded.pool.token_capacity - 1)
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
            )
        )
        longest = 0.0
        while not scheduler.idle:
            began = time.monotonic()
            step = scheduler.schedule(0.0)
            scheduler.complete(step, self._sample(step))
            longest = max(longest, time.monotonic() - began)
        return longest

    def serve(self, connection: EngineConnection) -> NoReturn:
        """Step for ever. Raises ConnectionClosed when the frontend is gone."""
        while True:
            self._take(connection.receive(None if self._scheduler.idle else 0), connection)
            step = self._scheduler.schedule(time.monotonic())
            if step.chunks or step.expired:
                connection.send(self._run(step))

    def _take(self, messages: list[ToEngine], connection: EngineConnection) -> None:
        asked = False
        for message in messages:
            if isinstance(message, Submit):
                self._submit(message, connection)
            elif isinstance(message, Abort):
                asked |= self._scheduler.abort(message.key)
            elif isinstance(message, Ping):
                asked = True
        if asked and self._scheduler.idle:
            connection.send(StepDone([], self._stats(None, 0.0), time.monotonic()))

    def _submit(self, request: Submit, connection: EngineConnection) -> None:
        """Queue a sequence. One that was begun under a larger cache, before a restart, may not fit any more."""
        try:
            self._scheduler.submit(request)
        except ValueError:
            full = Progress(request.key, None, Finished("context_full"), None, 0)
            connection.send(StepDone([full], self._stats(None, 0.0), time.monotonic()))

    def _run(self, step: Step) -> StepDone:
        began = time.monotonic()
        sampled = self._sample(step) if step.chunks else []
        ended = time.monotonic()
        decoded = sum(chunk.samples and chunk.sequence.output_count > 0 and chunk.count == 1 for chunk in step.chunks)
        stats_phase = _phase(len(step.chunks), decoded)
        self._steps += bool(step.chunks)
        self._prefill_tokens += step.tokens - decoded
        self._generated_tokens += sum(token is not None for token in sampled)
        progress = step.expired + self._scheduler.complete(step, sampled)
        return StepDone(progress, self._stats(step, ended - began, stats_phase), ended)

    def _sample(self, step: Step) -> list[int | None]:
        rows = [
            SamplerRow(
                sampling=chunk.sequence.request.sampling,
                banned=tuple(chunk.sequence.banned_ids),
                output_index=chunk.sequence.output_count,
            )
            for chunk in step.chunks
            if chunk.samples
        ]
        logits = self._loaded.runner.run(step)
        return self._sampler.sample(logits, rows) if rows else []

    def _new_scheduler(self) -> Scheduler:
        configure = self._configure
        window = self._loaded.ready.native_window
        return Scheduler(self._loaded.pool, configure.max_running, configure.max_step_tokens, window)

    def _stats(self, step: Step | None, seconds: float, phase: Phase = "idle") -> Stats:
        scheduler, pool = self._scheduler, self._loaded.pool
        gpu_allocated, gpu_reserved = self._gpu_memory.read(time.monotonic())
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            running_tokens=sum(sequence.computed for sequence in scheduler.running),
            waiting_tokens=sum(len(sequence.tokens) for sequence in scheduler.waiting),
            free_blocks=pool.free,
            used_blocks=pool.count - pool.free,
            steps_total=self._steps,
            prefill_tokens_total=self._prefill_tokens,
            generated_tokens_total=self._generated_tokens,
            preemptions_total=scheduler.preemptions,
            step_sequences=len(step.chunks) if step else 0,
            step_tokens=step.tokens if step else 0,
            step_seconds=seconds,
            step_phase=phase,
            gpu_allocated_bytes=gpu_allocated,
            gpu_reserved_bytes=gpu_reserved,
        )


def _phase(sequences: int, decoded: int) -> Phase:
    if sequences == 0:
        return "idle"
    if decoded == 0:
        return "prefill"
    return "decode" if decoded == sequences else "mixed"
