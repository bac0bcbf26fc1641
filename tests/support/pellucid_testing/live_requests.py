"""A table of live requests with its surroundings: an engine port that keeps what it is sent, readiness, metrics."""

from __future__ import annotations

import time
from typing import Any

from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_server.delivery import DEFAULT_PATIENCE, DeliveryRules, Patience
from pellucid_server.engine.messages import Abort, Finished, Progress, Sampling, StepDone, Submit
from pellucid_server.live_request import NO_OPTIONS, EngineOptions, LiveRequest, Plan
from pellucid_server.metrics import Metrics
from pellucid_server.readiness import Readiness
from pellucid_server.requests import RequestTable
from pellucid_server.text.stream import TextStream
from pellucid_testing.stats import stats

TOKENIZER = CharacterTokenizer.train(["abcdefghijklmnopqrstuvwxyz"])


class Recorder:
    """An engine port that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Submit | Abort] = []

    def send(self, *messages: Submit | Abort) -> None:
        self.sent += messages

    @property
    def aborted(self) -> list[int]:
        return [message.key for message in self.sent if isinstance(message, Abort)]


class Bench:
    """A table with its surroundings; the engine is up."""

    def __init__(
        self, max_live: int = 4, patience: Patience = DEFAULT_PATIENCE, max_running: int | None = None
    ) -> None:
        self.engine = Recorder()
        self.readiness = Readiness()
        self.metrics = Metrics("m", lambda: 0)
        self.table = RequestTable(self.engine, self.readiness, self.metrics, max_live, patience, max_running)
        self.readiness.engine_up()

    def start_many(
        self, count: int, options: EngineOptions = NO_OPTIONS, stops: tuple[str, ...] = (), **limits: Any
    ) -> LiveRequest:
        request = self.admit("many", sequences=count, **limits)
        plan = Plan([1, 2, 3], 3, 0, Sampling(0.0, 0, 1.0, 0.0, 7), 100, 0, [2], [], 64, options=options)
        self.table.start(request, plan, lambda: TextStream(TOKENIZER, stops))
        return request

    def token_of(self, request: LiveRequest, index: int, letter: str, finished: Finished | None = None) -> None:
        (token,) = TOKENIZER.encode(letter, add_special_tokens=False)
        self.step(Progress(request.sequences[index].key, [token], finished, time.monotonic(), 0))

    def admit(self, request_id: str = "r", **limits: Any) -> LiveRequest:
        limits = {"deadline": None, "time_limit": None, **limits}
        return self.table.admit(request_id, DeliveryRules(), **limits)

    def start(self, request_id: str = "r", stops: tuple[str, ...] = (), **limits: Any) -> LiveRequest:
        request = self.admit(request_id, **limits)
        plan = Plan([1, 2, 3], 3, 0, Sampling(0.0, 0, 1.0, 0.0, 7), 100, 0, [2], [], 64)
        self.table.start(request, plan, lambda: TextStream(TOKENIZER, stops))
        return request

    def step(self, *progress: Progress, running: int = 1) -> None:
        snapshot = stats(running=running, step_sequences=len(progress), step_tokens=1, step_phase="decode")
        self.table.engine_step(StepDone(list(progress), snapshot, [time.monotonic()]))

    def token(self, request: LiveRequest, letter: str, finished: Finished | None = None) -> None:
        (token,) = TOKENIZER.encode(letter, add_special_tokens=False)
        self.step(Progress(request.key, [token], finished, time.monotonic(), 0))

    def finished(self) -> dict[str, float]:
        return nonzero(self.metrics.finished)

    def sample(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": "m"})


def nonzero(counters: Any) -> dict[str, float]:
    values = {label: counter._value.get() for label, counter in counters.items()}
    return {label: value for label, value in values.items() if value}
