"""The live requests: admission, progress, engine restarts, and the one place where a request ends.

Every Generate call is either refused (`refuse`, or an error before it ran) or ends here, once, whatever the reason, in
`_end`: it leaves the table, the engine forgets it, its outbox closes, and it is counted. In this order.

In come admissions from rpc, StepDone messages and the engine's comings and goings; out go Submit and Abort to the
engine and deltas to each request's outbox. All of it runs on the event loop, and nothing in it waits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Protocol

from pellucid_server import errors
from pellucid_server.delivery import DEFAULT_PATIENCE, DeliveryRules, Outbox, Patience
from pellucid_server.engine.messages import Abort, Progress, Stats, StepDone, Submit
from pellucid_server.live_request import End, LiveRequest, Plan, submit_message, unseen_tokens, window_moves
from pellucid_server.logs import LOGGER
from pellucid_server.metrics import Metrics
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

    def send(self, message: Submit | Abort) -> None: ...


class RequestTable:
    """All live requests. `max_live` bounds them: those that run, at most `max_running`, and those that wait."""

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
        self._max_live = max_live
        self._max_running = max_live if max_running is None else max_running
        self._patience = patience
        self._keys = itertools.count(1)
        self._live: dict[int, LiveRequest] = {}
        self._by_id: dict[tuple[str, str], LiveRequest] = {}
        """By caller and request id: what others are doing shows in neither refusals nor Cancel."""
        self._streams: set[LiveRequest] = set()
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self.stats: Stats | None = None
        """The engine's last snapshot; None while there is no engine."""

    def admit(
        self,
        request_id: str,
        rules: DeliveryRules,
        *,
        deadline: float | None,
        time_limit: float | None,
        caller: str = "",
    ) -> LiveRequest:
        """Takes a place. Raises Unavailable, DeadlineExceeded, RequestIdInUse or QueueFull.

        `deadline` is on the monotonic clock; `time_limit` in seconds from now. Call `release` when the stream is done.
        """
        now = time.monotonic()
        self._readiness.require_ready()
        if deadline is not None and not now < deadline:
            raise errors.DeadlineExceeded("the deadline had passed when the request came in")
        if (caller, request_id) in self._by_id:
            raise errors.RequestIdInUse(f"request_id {request_id!r} is in use by a request in flight")
        if not len(self._live) < self._max_live:
            raise errors.QueueFull(f"{self._max_live} requests are running or waiting; try again later")
        request = LiveRequest(
            next(self._keys), request_id, now, deadline, time_limit, Outbox(rules, self._patience), caller
        )
        self._live[request.key] = request
        self._by_id[caller, request_id] = request
        self._streams.add(request)
        self._no_streams.clear()
        if time_limit is not None:
            loop = asyncio.get_running_loop()
            request.timer = loop.call_later(time_limit, self._finish, request, "time_limit")
        self._update_gauges()
        return request

    def start(self, request: LiveRequest, plan: Plan, text: TextStream | None) -> None:
        """Hands an admitted request to the engine, or, while that is away, to the next one."""
        request.plan = plan
        request.text = text
        if request.end is None and self._readiness.engine_is_up:
            self._engine.send(submit_message(request, plan))

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
        self._end(request, End(_reason(error), time.monotonic(), error))

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
        for request in list(self._live.values()):
            self._metrics.cancellations["shutdown"].inc()
            self.fail(request, errors.Draining("the server shut down before the request was done"))

    def engine_up(self) -> int:
        """A new engine takes over every request that has a plan, each where it stood. Returns how many."""
        taken = 0
        for request in list(self._live.values()):
            if request.plan is not None:
                request.recoveries += 1
                self._metrics.streams_recovered.inc()
                self._engine.send(submit_message(request, request.plan))
                taken += 1
        return taken

    def engine_down(self) -> None:
        """The engine died. Requests wait for the next one, unless engines keep dying on them.

        Engines run requests in the order of admission, so only the oldest ones can have had a part in it.
        """
        self.stats = None
        planned = [request for request in self._live.values() if request.plan is not None]
        for place, request in enumerate(planned):
            request.preemptions_before = request.preemptions
            if place < self._max_running:
                request.deaths += 1
                if request.deaths >= MAX_DEATHS:
                    error = errors.EngineDown(f"the engine died {MAX_DEATHS} times in a row; try again later")
                    self.fail(request, error)
        self._update_gauges()

    def engine_step(self, step: StepDone) -> None:
        """One step's tokens and ends."""
        for progress in step.progress:
            request = self._live.get(progress.key)
            if request is not None:
                self._advance_alone(request, progress, step.at)
        self.stats = step.stats
        self._update_gauges()

    @property
    def running_count(self) -> int:
        return min(self.stats.running, len(self._live)) if self.stats is not None else 0

    @property
    def waiting_count(self) -> int:
        return len(self._live) - self.running_count

    def _advance_alone(self, request: LiveRequest, progress: Progress, at: float) -> None:
        """A request whose own progress fails, in its tokenizer for instance, ends; the others go on."""
        try:
            self._advance(request, progress, at)
        except Exception:
            LOGGER.exception("a request failed", extra={"fields": {"request_id": request.request_id}})
            request.text = None
            message = f"an error in the server ended request {request.request_id!r}"
            self.fail(request, errors.InternalError(message))

    def _advance(self, request: LiveRequest, progress: Progress, at: float) -> None:
        request.preemptions = request.preemptions_before + progress.preemptions
        if request.first_scheduled_at is None and progress.first_scheduled_at is not None:
            self._count_prompt(request, progress.first_scheduled_at)
        finished = progress.finished
        if progress.token is not None:
            self._count_token(request, at)
            request.generated.append(progress.token)
            # The token that ends a sequence as an end or stop token has no text of its own.
            is_end_token = finished is not None and finished.kind in ("eos", "stop_token")
            matched = self._add_token(request, progress.token, with_text=not is_end_token)
            if matched is not None:
                end = End("stop_string", at, matched_stop_string=matched)
                self._end(request, end, engine_knows=finished is not None)
                return
        if finished is None:
            if request.outbox.is_stalled(time.monotonic()):
                self.fail(request, errors.SlowConsumer("the stream was not read for too long while output piled up"))
                request.outbox.interrupt()
        elif finished.kind == "non_finite":
            self._metrics.non_finite_logits.inc()
            message = f"the model's logits are not finite; request {request.request_id!r} cannot go on"
            self._end(request, End("non_finite_logits", at, errors.NonFiniteLogits(message)), engine_knows=True)
        elif finished.kind == "deadline":
            self._metrics.cancellations["deadline"].inc()
            error = errors.DeadlineExceeded("the deadline passed before the request was done")
            self._end(request, End("deadline", at, error), engine_knows=True)
        else:
            end = End(finished.kind, at, matched_token_id=finished.matched_token_id)
            self._end(request, end, engine_knows=True)

    def _add_token(self, request: LiveRequest, token: int, *, with_text: bool) -> str | None:
        """The token's way into the outbox; returns the stop string it completed."""
        if request.text is None or not with_text:
            request.outbox.add(token, "")
            return None
        delta = request.text.push(token)
        request.outbox.add(token, delta.text)
        return delta.matched_stop

    def _count_prompt(self, request: LiveRequest, first_scheduled_at: float) -> None:
        request.first_scheduled_at = first_scheduled_at
        self._metrics.queue_time.observe(first_scheduled_at - request.admitted_at)
        if request.plan is not None:
            self._metrics.prompt_tokens.inc(request.plan.prompt_token_count)

    def _count_token(self, request: LiveRequest, at: float) -> None:
        request.deaths = 0
        self._metrics.generated_tokens.inc()
        if request.first_token_at is None or request.last_token_at is None:
            request.first_token_at = at
            self._metrics.time_to_first_token.observe(at - request.admitted_at)
        else:
            self._metrics.inter_token.observe(at - request.last_token_at)
        request.last_token_at = at

    def _finish(self, request: LiveRequest, reason: str) -> None:
        """An end that is the frontend's own and OK for the client."""
        self._end(request, End(reason, time.monotonic()))

    def _end(self, request: LiveRequest, end: End, *, engine_knows: bool = False) -> None:
        if request.end is not None:
            return
        request.end = end
        del self._live[request.key]
        del self._by_id[request.caller, request.request_id]
        if request.timer is not None:
            request.timer.cancel()
        if request.plan is not None and not engine_knows:
            self._engine.send(Abort(request.key))
        if request.text is not None and end.error is None and end.matched_stop_string is None:
            request.outbox.add(None, request.text.finish())
        request.outbox.close()
        self._count_end(request, end)
        self._update_gauges()

    def _count_end(self, request: LiveRequest, end: End) -> None:
        metrics = self._metrics
        if request.plan is None and end.reason in metrics.rejections:
            metrics.rejections[end.reason].inc()
            return
        metrics.finished[end.reason].inc()
        metrics.e2e_latency.observe(end.at - request.admitted_at)
        metrics.request_generated_tokens.observe(len(request.generated))
        if request.plan is not None:
            metrics.request_prompt_tokens.observe(request.plan.prompt_token_count)
            self._count_windows(request, request.plan)
        if request.first_token_at is None or request.last_token_at is None:
            return
        if request.first_scheduled_at is not None:
            metrics.prefill_time.observe(request.first_token_at - request.first_scheduled_at)
        decode_time = request.last_token_at - request.first_token_at
        metrics.decode_time.observe(decode_time)
        if len(request.generated) > 1:
            metrics.time_per_output_token.observe(decode_time / (len(request.generated) - 1))

    def _count_windows(self, request: LiveRequest, plan: Plan) -> None:
        if plan.overflow in self._metrics.window_moves:
            self._metrics.window_moves[plan.overflow].inc(window_moves(request, plan))
        if plan.overflow in self._metrics.dropped_context_tokens:
            self._metrics.dropped_context_tokens[plan.overflow].inc(unseen_tokens(request, plan))

    def _update_gauges(self) -> None:
        self._metrics.requests_running.set(self.running_count)
        self._metrics.requests_waiting.set(self.waiting_count)


_REASONS: Sequence[tuple[type[errors.ServeError], str]] = (
    (errors.Draining, "shutdown"),
    (errors.DeadlineExceeded, "deadline"),
)


def _reason(error: errors.ServeError) -> str:
    """The label of an end by error: the reason it has in the API, where metrics have no other word for it."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), error.reason.lower())
