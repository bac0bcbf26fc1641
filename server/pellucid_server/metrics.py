"""Every metric of the server, in one registry of its own; docs/metrics.md lists them for people.

Requests report their ends here (`requests.py` alone does that), the engine its steps. The engine counts from its own
start; the totals of those that are gone are added, so that the counters here survive an engine restart.

What changes with every token or step is read when it is scraped (`tallies.py`); the rest is prometheus_client's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.process_collector import ProcessCollector

from pellucid_server.engine.messages import Ready, Stats, StepDone
from pellucid_server.tallies import Histogram, ReadCounter, Tally

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5),
)
REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
LENGTH_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
STEP_BUCKETS = tuple(2**e for e in range(15))

SLIDING_POLICIES = ("roll", "reencode")
FINISH_REASONS = (
    *("eos", "stop_token", "stop_string", "max_new_tokens", "context_full", "time_limit", "cancelled"),
    *("constraint_done", "no_token", "request_too_large"),
    *("client_cancelled", "deadline", "slow_consumer", "engine_down", "non_finite_logits", "shutdown", "engine_error"),
)
REJECTION_REASONS = (
    *("invalid_field", "unsupported_field", "prompt_too_long", "model_not_found", "request_id_in_use"),
    *("request_too_large", "queue_full", "draining", "model_loading", "engine_down", "deadline_exceeded"),
    "engine_error",
)
RESTART_REASONS = ("exit", "signal", "start_failed", "hung")
CANCELLATION_CAUSES = ("client", "deadline", "shutdown")
COMMIT_VARIABLE = "PELLUCID_COMMIT"
"""Environment variable in which an image may say what it was built from."""
STEP_PHASES = ("prefill", "decode", "mixed")
TOTALS = {
    "preemptions_total": ("preemptions", "Times a sequence gave up its KV blocks"),
    "prefill_tokens_total": ("prefill_tokens", "Prompt and recomputed tokens run through the model"),
    "prefix_queried_tokens_total": ("prefix_cache_queried_tokens", "Prompt tokens looked up in the cache"),
    "prefix_hit_tokens_total": ("prefix_cache_hit_tokens", "Prompt tokens found in the cache"),
    "drafted_tokens_total": ("drafted_tokens", "Tokens guessed and run through the model"),
    "accepted_tokens_total": ("accepted_tokens", "Guessed tokens that were sampled indeed"),
}
"""Fields of Stats that count from the engine's start, with the counters they feed."""


class Metrics:
    """The registry and its metrics; children of closed label sets exist from the start, so that rates work at once."""

    def __init__(self, model_name: str, engine_pid: Callable[[], int]) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._model = model_name
        seconds = self._histogram
        self.time_to_first_token = seconds("time_to_first_token_seconds", "Admission to first token", TTFT_BUCKETS)
        self.inter_token = seconds("inter_token_latency_seconds", "Gap between two tokens of a request", TOKEN_BUCKETS)
        self.time_per_output_token = seconds(
            "request_time_per_output_token_seconds", "Mean gap between tokens, once per request", TOKEN_BUCKETS
        )
        self.queue_time = seconds("request_queue_time_seconds", "Admission to first step", REQUEST_BUCKETS)
        self.prefill_time = seconds("request_prefill_time_seconds", "First step to first token", REQUEST_BUCKETS)
        self.decode_time = seconds("request_decode_time_seconds", "First token to last token", REQUEST_BUCKETS)
        self.e2e_latency = seconds("e2e_request_latency_seconds", "Admission to end", REQUEST_BUCKETS)
        self.request_prompt_tokens = seconds("request_prompt_tokens", "Prompt tokens per request", LENGTH_BUCKETS)
        self.request_generated_tokens = seconds(
            "request_generated_tokens", "Generated tokens per request", LENGTH_BUCKETS
        )
        self.requests_running = self._gauge("requests_running", "Requests the engine is working on")
        self.requests_waiting = self._gauge("requests_waiting", "Admitted requests the engine is not working on yet")
        self._finished = self._counter("requests_finished", "Admitted requests by how they ended", "reason")
        self.finished = {reason: self._finished.labels(self._model, reason) for reason in FINISH_REASONS}
        self._rejections = self._counter("request_rejections", "Generate calls refused before they ran", "reason")
        self.rejections = {reason: self._rejections.labels(self._model, reason) for reason in REJECTION_REASONS}
        self._cancellations = self._counter("request_cancellations", "Requests ended from outside", "cause")
        self.cancellations = {cause: self._cancellations.labels(self._model, cause) for cause in CANCELLATION_CAUSES}
        moves = self._counter("window_moves", "Moves of context windows, counted when a request ends", "policy")
        self.window_moves = {policy: moves.labels(self._model, policy) for policy in SLIDING_POLICIES}
        dropped = self._counter(
            "dropped_context_tokens", "Tokens no longer seen by the model, counted when a request ends", "policy"
        )
        self.dropped_context_tokens = {
            policy: dropped.labels(self._model, policy) for policy in ("truncate", *SLIDING_POLICIES)
        }
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have run").labels(
            self._model
        )
        self.generated_token_count = 0
        ReadCounter(
            self.registry,
            "pellucid_generated_tokens",
            "Tokens given to requests",
            model_name,
            lambda: self.generated_token_count,
        )
        self.non_finite_logits = self._counter("non_finite_logits", "Requests ended by NaN or infinite logits").labels(
            self._model
        )
        self.streams_recovered = self._counter(
            "streams_recovered", "Requests carried over to a restarted engine"
        ).labels(self._model)
        self.calls = Counter(
            "pellucid_requests", "Calls by method and status", ["method", "grpc_code"], registry=self.registry
        )
        self.errors = Counter(
            "pellucid_errors",
            "Calls that the server ended with an error",
            ["grpc_code", "reason"],
            registry=self.registry,
        )
        self.auth_failures = Counter(
            "pellucid_auth_failures", "Calls without a token of this server's", registry=self.registry
        )
        self.server_ready = Gauge("pellucid_server_ready", "1 while requests are accepted", registry=self.registry)
        self.engine = EngineMetrics(self.registry, model_name)
        ProcessCollector(registry=self.registry)
        ProcessCollector(namespace="pellucid_engine", pid=engine_pid, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Tally:
        return _histogram(self.registry, self._model, name, help, buckets)

    def _gauge(self, name: str, help: str) -> Gauge:
        return _gauge(self.registry, self._model, name, help)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"pellucid_{name}", help, ["model_name", *labels], registry=self.registry)


class _Seen(NamedTuple):
    """What is known of the engine's work. It is replaced as a whole, so that a scrape sees it before or after."""

    stats: Stats | None
    """Of the engine that is up, once it has told any."""
    before: tuple[int, ...] = (0,) * len(TOTALS)
    """Totals of those that were before it, in the order of TOTALS."""

    def totals(self) -> tuple[int, ...]:
        """Of all engines."""
        if self.stats is None:
            return self.before
        return tuple(past + getattr(self.stats, total) for past, total in zip(self.before, TOTALS, strict=True))


class EngineMetrics:
    """What the engine tells about itself: capacity once it is ready, and a snapshot with every report of its steps."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model = model_name
        self._seen = _Seen(None)
        self._heard_at = 0.0
        self._capacity = 0
        self.up = Gauge("pellucid_engine_up", "1 while the engine process is ready", registry=registry)
        restarts = Counter("pellucid_engine_restarts", "Engines lost and started again", ["reason"], registry=registry)
        self.restarts = {reason: restarts.labels(reason) for reason in RESTART_REASONS}
        step_seconds = Histogram(
            registry,
            "pellucid_engine_step_duration_seconds",
            "Duration of a step",
            ("model_name", "phase"),
            TOKEN_BUCKETS,
        )
        self._phases = {phase: step_seconds.labels(model_name, phase) for phase in STEP_PHASES}
        self._batch_size = _histogram(registry, model_name, "step_batch_size", "Sequences per step", STEP_BUCKETS)
        self._step_tokens = _histogram(registry, model_name, "step_tokens", "Tokens computed per step", STEP_BUCKETS)
        self._export_snapshot()
        self._block_limit = _gauge(registry, model_name, "kv_cache_blocks_limit", "KV blocks in all")
        self._gpu_memory = {
            state: Gauge(
                f"pellucid_gpu_memory_{state}_bytes",
                f"GPU memory {state} by torch, missing without a GPU",
                ["device"],
                registry=registry,
            )
            for state in ("allocated", "reserved")
        }
        self._device = ""
        self._build = Gauge(
            "pellucid_build_info", "What runs; always 1", ["version", "torch", "device", "commit"], registry=registry
        )
        self._cache_config = Gauge(
            "pellucid_cache_config_info",
            "Shape of the KV cache; always 1",
            ["model_name", "block_size", "num_blocks"],
            registry=registry,
        )

    def _export_snapshot(self) -> None:
        """What is read from the last snapshot."""
        registry, model = self._registry, self._model
        blocks = Gauge("pellucid_kv_cache_blocks", "KV blocks by state", ["model_name", "state"], registry=registry)
        for place, state in enumerate(("used", "cached", "free")):
            blocks.labels(model, state).set_function(partial(self._block_count, place))
        usage = _gauge(registry, model, "kv_cache_usage_ratio", "Used share of the KV blocks, 0 to 1")
        usage.set_function(self._usage)
        last_step = _gauge(
            registry, model, "engine_last_step_timestamp_seconds", "Unix time of the last message from the engine"
        )
        last_step.set_function(lambda: self._heard_at)
        for place, (name, help) in enumerate(TOTALS.values()):
            ReadCounter(registry, f"pellucid_{name}", help, model, partial(self._total, place))

    def _block_count(self, place: int) -> int:
        return self._blocks()[place]

    def _usage(self) -> float:
        blocks = self._blocks()  # once: the engine may go down between two looks
        return blocks[0] / max(1, sum(blocks))

    def _total(self, place: int) -> int:
        return self._seen.totals()[place]

    def _blocks(self) -> tuple[int, int, int]:
        """Used, cached, free."""
        stats = self._seen.stats
        if stats is None:
            return 0, 0, self._capacity
        return stats.used_blocks, stats.cached_blocks, stats.free_blocks

    def ready(self, ready: Ready, version: str) -> None:
        """A new engine is up and counts from zero."""
        self._begin(ready.kv_block_count)
        self.up.set(1)
        self._block_limit.set(ready.kv_block_count)
        self._device = ready.device
        self._build.clear()
        self._build.labels(version, _torch_version(), ready.device, os.environ.get(COMMIT_VARIABLE, "")).set(1)
        self._cache_config.clear()
        self._cache_config.labels(self._model, str(ready.kv_block_size), str(ready.kv_block_count)).set(1)

    def down(self) -> None:
        """The engine is gone, and its cache with it."""
        self._begin(0)
        self.up.set(0)
        for gauge in self._gpu_memory.values():
            gauge.clear()

    def _begin(self, capacity: int) -> None:
        """No snapshot holds any more; so many KV blocks are there."""
        self._capacity = capacity
        self._seen = _Seen(None, self._seen.totals())

    def step(self, step: StepDone, wall_time: float) -> None:
        """One snapshot. `wall_time` is the Unix time at which it came in."""
        stats = step.stats
        self._seen = _Seen(stats, self._seen.before)
        self._heard_at = wall_time
        if stats.gpu_reserved_bytes:
            self._gpu_memory["allocated"].labels(self._device).set(stats.gpu_allocated_bytes)
            self._gpu_memory["reserved"].labels(self._device).set(stats.gpu_reserved_bytes)
        if stats.step_phase != "idle":
            for seconds in step.step_seconds:
                self._phases[stats.step_phase].observe(seconds)
                self._batch_size.observe(stats.step_sequences)
                self._step_tokens.observe(stats.step_tokens)


def _histogram(registry: CollectorRegistry, model_name: str, name: str, help: str, buckets: Sequence[float]) -> Tally:
    return Histogram(registry, f"pellucid_{name}", help, ("model_name",), buckets).labels(model_name)


def _gauge(registry: CollectorRegistry, model_name: str, name: str, help: str) -> Gauge:
    return Gauge(f"pellucid_{name}", help, ["model_name"], registry=registry).labels(model_name)


def _torch_version() -> str:
    """Read from the installed metadata: the frontend does not import torch."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"
