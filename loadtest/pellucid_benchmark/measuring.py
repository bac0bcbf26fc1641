"""Runs every scenario on every engine, round after round, so that what the machine does meanwhile meets all alike.

A run in which other processes took more than QUIET of the processors is kept, marked, and left out of the medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pellucid_benchmark.engines import Running
from pellucid_benchmark.processes import Worker, WorkerError, resident_mib, watching
from pellucid_benchmark.scenarios import Answer, Scenario

QUIET = 0.07


@dataclass(frozen=True)
class Sample:
    engine: str
    scenario: str
    round: int
    value: float
    """Tokens per second."""
    first_seconds: float
    foreign: float
    """Share of the processors that others took."""
    own: float
    ids: tuple[int, ...]

    @property
    def quiet(self) -> bool:
        return self.foreign <= QUIET


@dataclass(frozen=True)
class Summary:
    """Medians of the quiet samples, or of all where none was quiet."""

    engine: str
    scenario: str
    value: float
    lowest: float
    highest: float
    first_ms: float
    samples: int
    quiet_samples: int


def measure(
    engines: Sequence[Running],
    limits: Worker | None,
    scenarios: Sequence[Scenario],
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All samples, limits and memory of a model's runs. An engine that fails a scenario is left out of it, with why."""
    samples: list[Sample] = []
    machine: list[dict[str, float]] = []
    failures: dict[str, str] = {}
    memory: dict[str, float] = {}
    for engine in engines:
        _try(engine, scenarios[0], -1)  # warm
        memory[engine.label] = resident_mib(_all_pids(engine))
        engine.sleep()
    for number in range(rounds):
        for scenario in scenarios:
            if limits is not None:
                machine.append(limits.ask({}))
            # Everyone begins a round as often as the others: what the first run leaves behind is nobody's advantage.
            turn = number % len(engines)
            for engine in [*engines[turn:], *engines[:turn]]:
                key = f"{engine.label} {scenario.name}"
                if key in failures:
                    continue
                try:
                    samples.append(_sample(engine, scenario, number))
                except WorkerError as error:
                    failures[key] = str(error)
                    say(f"{key}: {error}")
                else:
                    say(_line(samples[-1]))
                    memory[engine.label] = max(memory[engine.label], resident_mib(_all_pids(engine)))
    return {
        "samples": [asdict(sample) for sample in samples],
        "summaries": [asdict(summary) for summary in summarize(samples)],
        "limits": machine,
        "failures": failures,
        "resident_mib": memory,
    }


def summarize(samples: Sequence[Sample]) -> list[Summary]:
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.engine, sample.scenario), []).append(sample)
    summaries = []
    for (engine, scenario), group in groups.items():
        quiet = [sample for sample in group if sample.quiet]
        counted = quiet or group
        values = [sample.value for sample in counted]
        first = statistics.median(sample.first_seconds for sample in counted)
        middle = statistics.median(values)
        summaries.append(
            Summary(engine, scenario, middle, min(values), max(values), 1000 * first, len(group), len(quiet))
        )
    return summaries


def _sample(engine: Running, scenario: Scenario, number: int) -> Sample:
    engine.wake()
    try:
        _try(engine, scenario, -2 - number, new=1)  # back in the caches, at speed
        with watching(engine.pids) as load:
            answer = _try(engine, scenario, number)
    finally:
        engine.sleep()
    value = scenario.value(answer)
    return Sample(engine.label, scenario.name, number, value, answer.first, load.foreign, load.own, answer.ids)


def _try(engine: Running, scenario: Scenario, number: int, new: int | None = None) -> Answer:
    prompts = scenario.prompts(engine.worker.about["vocab_size"], number)
    answer = engine.worker.ask({"prompts": prompts, "new": scenario.new_tokens if new is None else new})
    wanted = scenario.streams * (scenario.new_tokens if new is None else new)
    if answer["tokens"] != wanted:
        raise WorkerError(f"made {answer['tokens']} tokens, not {wanted}")
    return Answer(answer["first"], answer["last"], answer["tokens"], tuple(answer["ids"]))


def _all_pids(engine: Running) -> list[int]:
    """The processes that serve: for Pellucid the server's two, without the client."""
    return engine.server.processes() if engine.server else [engine.worker.pid]


def _line(sample: Sample) -> str:
    noise = "" if sample.quiet else f"   noisy: others took {100 * sample.foreign:.0f} %"
    return f"{sample.round + 1:3d}  {sample.scenario:14} {sample.engine:24} {sample.value:10.1f} tokens/s{noise}"
