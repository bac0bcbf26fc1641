"""What a server of the benchmark's own counts, read from its Prometheus page: steps and their seconds."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

SCRAPE_SECONDS = 30.0
_STEPS = "pellucid_engine_step_duration_seconds"


@dataclass(frozen=True)
class Steps:
    """Steps of the engine and the time that they took."""

    count: float
    seconds: float

    @property
    def mean(self) -> float:
        """Seconds of a step; 0 where there was none."""
        return self.seconds / self.count if self.count else 0.0


@dataclass(frozen=True)
class Counters:
    """One reading."""

    steps: dict[str, Steps]
    """By phase: prefill, decode, mixed."""

    @staticmethod
    def read(address: str) -> Counters:
        """From HOST:PORT. Raises OSError."""
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_SECONDS) as answer:
            text = answer.read().decode()
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        count = {each.labels["phase"]: each.value for each in samples if each.name == f"{_STEPS}_count"}
        total = {each.labels["phase"]: each.value for each in samples if each.name == f"{_STEPS}_sum"}
        return Counters({phase: Steps(count[phase], total[phase]) for phase in count})

    def steps_since(self, earlier: Counters, phases: Sequence[str] = ("prefill", "decode", "mixed")) -> Steps:
        """Those between two readings, of these phases together."""
        pairs = [(self.steps[phase], earlier.steps[phase]) for phase in phases]
        return Steps(
            sum(now.count - then.count for now, then in pairs), sum(now.seconds - then.seconds for now, then in pairs)
        )
