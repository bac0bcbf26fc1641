"""The live requests: admission, engine restarts, and the one place where a request ends.

A request has one sequence or several. Each ends once, in `_end_sequence`: the engine forgets it, and its last text and
its end go into the outbox. Every Generate call is either refused (`refuse`, or an error before it ran) or ends here,
once, whatever the reason, in `_end`: the sequences that are left end, it leaves the table, its outbox closes, and it is
counted. In this order.

In come admissions from rpc, StepDone messages (progress.py says what one brings to a sequence) and the engine's comings
and goings; out go Submit and Abort to the engine and deltas to each request's outbox. All of it runs on the event loop,
and nothing in it waits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pellucid_server import errors
from pellucid_server.accounts import Accounts, reason_of
from pellucid_server.delivery import DEFAULT_PATIENCE, DeliveryRules, Outbox, Patience
from pellucid_server.ends import End
from pellucid_server.engine.messages import Abort, Progress, Stats, StepDone, Submit
from pellucid_server.engine.sequence import AGEING_SECONDS
from pellucid_server.live_request import LiveRequest, LiveSequence, Plan, submit_messages
from pellucid_server.logs import LOGGER
from pellucid_server.metrics import Metrics
from pellucid_server.pace import LONGEST_GAP, Pace
from pellucid_server.progress import advance
from pellucid_server.readiness import Readiness
from pellucid_server.text.stream import TextStream

MAX_DEATHS = 3
"""Engine deaths in a row without a token for a request, after which the request is given up."""
DEADLINE_SLACK = 0.05
"""Seconds by which a client that gives up at its deadline may be ahead of the server, whose clock began later."""


def is_expired(deadline: float | None) -> bool:
    """Whether a call that its client has ended, ended at its deadline (monotonic clock)."""
    return deadline is not None and time.monotonic() >= deadline - DEADLINE_SLACK


class EnginePort(Protocol):
    """Where messages to the engine go. Sending never waits; without an engine, messages are dropped."""

    def send(self, *messages: Submit | Abort) -> None: ...


class RequestTable:
    """All live requests. `max_live` bounds their sequences, of which at most `max_running` run and the others wait."""

    def __init__(
        self,
        engine: EnginePort,
        readiness: Readiness,
        metrics: Metrics,
        max_live: int,
        patience: Patience = DEFAULT_PATIENCE,
        max_running: int | None = None,
    ) -> None:
        self._engine = engine
        self._readiness = readiness
        self._metrics = metrics
        self._accounts = Accounts(metrics)
        self._max_live = max_live
        self._max_running = max_live if max_running is None else max_running
        self._patience = patience
        self._pace = Pace()
        self._keys = itertools.count(1)
        self._live: dict[int, tuple[LiveRequest, LiveSequence]] = {}
        """Sequences that have not ended, by key, in the order of admission."""
        self._by_id: dict[tuple[str, str], LiveRequest] = {}
        """By caller and request id: what others are doing shows in neither refusals nor Cancel."""
        self._streams: set[LiveRequest] = set()
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self.stats: Stats | None = None
        """The engine's last snapshot; None while there is no engine."""
        metrics.requests_running.set_function(lambda: self.running_count)
        metrics.requests_waiting.set_function(lambda: self.waiting_count)

    def admit(
        self,
        request_id: str,
        rules: DeliveryRules,
        *,
        deadline: float | None,
        time_limit: float | None,
        caller: str = "",
        sequences: int = 1,
    ) -> LiveRequest:
        """Takes a place for each sequence. Raises Unavailable, DeadlineExceeded, RequestIdInUse or QueueFull.

        `deadline` is on the monotonic clock; `time_limit` in seconds from now. Call `release` when the stream is done.
        """
        now = time.monotonic()
        self._readiness.require_ready()
        if deadline is not None and not now < deadline:
            raise errors.DeadlineExceeded("the deadline had passed when the request came in")
        if (caller, request_id) in self._by_id:
            raise errors.RequestIdInUse(f"request_id {request_id!r} is in use by a request in flight")
        if not len(self._live) + sequences <= self._max_live:
            taken = f"{len(self._live)} of {self._max_live} places are taken"
            raise errors.QueueFull(f"{taken}, and this request needs {sequences}; try again later")
        made = [LiveSequence(next(self._keys), index) for index in range(sequences)]
        outbox = Outbox(rules, self._patience, self._pace)
        request = LiveRequest(request_id, now, deadline, time_limit, outbox, made, caller)
        self._live.update((sequence.key, (request, sequence)) for sequence in made)
        self._by_id[caller, request_id] = request
        self._streams.add(request)
        self._no_streams.clear()
        if time_limit is not None:
            loop = asyncio.get_running_loop()
            # The engine ends it, with all tokens up to the limit, unless it is away or busy.
            request.timer = loop.call_later(time_limit + LONGEST_GAP, self._finish, request, "time_limit")
        return request

    def start(self, request: LiveRequest, plan: Plan, text: Callable[[], TextStream | None]) -> None:
        """Hands an admitted request to the engine, or, while that is away, to the next one.

        `text` makes the text of one sequence; None where there is no tokenizer.
        """
        request.plan = plan
        for sequence in request.sequences:
            sequence.text = text()
        if plan.options.prompt_logprobs is not None:
            request.outbox.hold()
        if request.end is None and self._readiness.engine_is_up:
            self._submit(request, plan)

    def refuse(self, error: errors.ServeError) -> None:
        """Counts a Generate call that was not admitted."""
        self._metrics.rejections[error.reason.lower()].inc()

    def cancel(self, request_id: str, caller: str = "") -> bool:
        """The Cancel call: the stream ends OK as cancelled. False where the caller has no such request in flight."""
        request = self._by_id.get((caller, request_id))
        if request is None:
            return False
        self._metrics.cancellations["client"].inc()
        self._finish(request, "cancelled")
        return True

    def abandon(self, request: LiveRequest) -> None:
        """The call is over on the client's side: it was cancelled, lost, or ran into its deadline."""
        expired = is_expired(request.deadline)
        cause = "deadline" if expired else "client"
        if request.end is None:
            self._metrics.cancellations[cause].inc()
        self._end(request, End("deadline" if expired else "client_cancelled", time.monotonic()))

    def fail(self, request: LiveRequest, error: errors.ServeError) -> None:
        """The call ends with this error."""
        self._end(request, End(reason_of(error), time.monotonic(), error))

    def release(self, request: LiveRequest) -> None:
        """The stream is done: nothing more is written to it."""
        self._streams.discard(request)
        if not self._streams:
            self._no_streams.set()

    async def wait_until_released(self) -> None:
        """Returns when no stream is open."""
        await self._no_streams.wait()

    def shut_down(self) -> None:
        """Ends what is left after the drain time."""
        for request in self._requests():
            self._metrics.cancellations["shutdown"].inc()
            self.fail(request, errors.Draining("the server shut down before the request was done"))

    def engine_up(self) -> int:
        """A new engine takes over every request that has a plan, each where it stood. Returns how many."""
        taken = 0
        for request in self._requests():
            if request.plan is not None:
                request.recoveries += 1
                self._metrics.streams_recovered.inc()
                self._submit(request, request.plan)
                taken += 1
        return taken

    def engine_down(self) -> None:
        """The engine died. Requests wait for the next one, unless engines keep dying on them.

        Engines run requests in the order of admission and priority, so only the first ones can have had a part in it.
        """
        self.stats = None
        place = 0
        for request in sorted(self._requests(), key=_rank):
            if request.plan is None:
                continue
            request.deaths += place < self._max_running
            place += len(request.unfinished)
            for sequence in request.unfinished:
                sequence.preemptions_before = sequence.preemptions
            if request.deaths >= MAX_DEATHS:
                error = errors.EngineDown(f"the engine died {MAX_DEATHS} times in a row; try again later")
                self.fail(request, error)

    def engine_step(self, step: StepDone) -> None:
        """What one step, or several in a row, brought: tokens and ends."""
        self._pace.step(step.at[-1])
        for progress in step.progress:
            found = self._live.get(progress.key)
            if found is not None:
                self._advance_alone(*found, progress, step.at)
        self.stats = step.stats

    @property
    def running_count(self) -> int:
        stats = self.stats
        return min(stats.running, len(self._live)) if stats is not None else 0

    @property
    def waiting_count(self) -> int:
        return max(0, len(self._live) - self.running_count)

    def _requests(self) -> list[LiveRequest]:
        """Each once, in the order of admission."""
        return list(dict.fromkeys(request for request, _ in self._live.values()))

    def _submit(self, request: LiveRequest, plan: Plan) -> None:
        self._engine.send(*submit_messages(request, plan))

    def _advance_alone(
        self, request: LiveRequest, sequence: LiveSequence, progress: Progress, at: Sequence[float]
    ) -> None:
        """A request whose own progress fails, in its tokenizer for instance, ends; the others go on."""
        try:
            ending = advance(request, sequence, progress, at, self._accounts)
            if ending is not None:
                self._end_sequence(request, sequence, ending.end, engine_knows=ending.engine_knows)
        except Exception:
            LOGGER.exception("a request failed", extra={"fields": {"request_id": request.request_id}})
            message = f"an error in the server ended request {request.request_id!r}"
            self.fail(request, errors.InternalError(message))

    def _finish(self, request: LiveRequest, reason: str) -> None:
        """An end that is the frontend's own and OK for the client."""
        self._end(request, End(reason, time.monotonic()))

    def _end_sequence(self, request: LiveRequest, sequence: LiveSequence, end: End, *, engine_knows: bool) -> None:
        """The last one to end ends the request, and so does one that ends in an error."""
        sequence.end = end
        del self._live[sequence.key]
        if request.plan is not None and not engine_knows:
            self._engine.send(Abort(sequence.key))
        if end.error is None:
            if sequence.text is not None and end.matched_stop_string is None:
                request.outbox.add((), sequence.text.finish(), index=sequence.index)
            request.outbox.end(sequence.index, end, len(sequence.generated))
        if end.error is not None or not request.unfinished:
            self._end(request, end)

    def _end(self, request: LiveRequest, end: End) -> None:
        if request.end is not None:
            return
        request.end = end
        for sequence in request.unfinished:
            self._end_sequence(request, sequence, end, engine_knows=False)
        del self._by_id[request.caller, request.request_id]
        if request.timer is not None:
            request.timer.cancel()
        request.outbox.close()
        self._accounts.ended(request, end)


def _rank(request: LiveRequest) -> float:
    """Whom an engine runs first has the least."""
    priority = 0 if request.plan is None else request.plan.options.priority
    return request.admitted_at - AGEING_SECONDS * priority
