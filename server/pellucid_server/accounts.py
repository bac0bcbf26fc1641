"""What is counted of requests, in which moment of their lives; `requests` and `progress` say when that is.

Each request is counted once at its end: as a rejection where it never ran, else by how it ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from pellucid_server import errors
from pellucid_server.ends import End
from pellucid_server.engine.messages import FinishKind
from pellucid_server.live_request import LiveRequest, LiveSequence, Plan, unseen_tokens, window_moves
from pellucid_server.metrics import Metrics


class Accounts:
    """Tells the metrics. The requests are as they were just before the event."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def scheduled(self, request: LiveRequest, at: float) -> None:
        """The first step that worked on the request has begun."""
        self._metrics.queue_time.observe(at - request.admitted_at)
        if request.plan is not None:
            self._metrics.prompt_tokens.inc(request.plan.prompt_token_count)

    def tokens(self, request: LiveRequest, sequence: LiveSequence, times: Sequence[float]) -> None:
        """Tokens have come, sampled at these moments."""
        self._metrics.generated_token_count += len(times)
        last = sequence.last_token_at
        if last is None and request.first_token_at is None:
            self._metrics.time_to_first_token.observe(times[0] - request.admitted_at)
        for at in times:
            if last is not None and at > last:  # else one step brought both
                self._metrics.inter_token.observe(at - last)
            last = at

    def engine_finished(self, kind: FinishKind) -> None:
        """The engine has ended a sequence."""
        if kind == "non_finite":
            self._metrics.non_finite_logits.inc()
        elif kind == "deadline":
            self._metrics.cancellations["deadline"].inc()

    def ended(self, request: LiveRequest, end: End) -> None:
        metrics = self._metrics
        if request.plan is None and end.reason in metrics.rejections:
            metrics.rejections[end.reason].inc()
            return
        metrics.finished[end.reason].inc()
        metrics.e2e_latency.observe(end.at - request.admitted_at)
        metrics.request_generated_tokens.observe(request.output_token_count)
        if request.plan is not None:
            metrics.request_prompt_tokens.observe(request.plan.prompt_token_count)
            self._count_windows(request, request.plan)
        first_token_at, last_token_at = request.first_token_at, request.last_token_at
        if first_token_at is None or last_token_at is None:
            return
        if request.first_scheduled_at is not None:
            metrics.prefill_time.observe(first_token_at - request.first_scheduled_at)
        metrics.decode_time.observe(last_token_at - first_token_at)
        for sequence in request.sequences:
            if sequence.first_token_at is not None and sequence.last_token_at is not None and sequence.generated[1:]:
                gaps = len(sequence.generated) - 1
                metrics.time_per_output_token.observe((sequence.last_token_at - sequence.first_token_at) / gaps)

    def _count_windows(self, request: LiveRequest, plan: Plan) -> None:
        if plan.overflow in self._metrics.window_moves:
            self._metrics.window_moves[plan.overflow].inc(window_moves(request, plan))
        if plan.overflow in self._metrics.dropped_context_tokens:
            self._metrics.dropped_context_tokens[plan.overflow].inc(unseen_tokens(request, plan))


_REASONS: Sequence[tuple[type[errors.ServeError], str]] = (
    (errors.Draining, "shutdown"),
    (errors.DeadlineExceeded, "deadline"),
)


def reason_of(error: errors.ServeError) -> str:
    """The label of an end by error: the reason it has in the API, where metrics have no other word for it."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), error.reason.lower())
