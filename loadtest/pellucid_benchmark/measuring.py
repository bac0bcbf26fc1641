"""Runs every scenario on every engine, round after round, so that what the machine does meanwhile meets all alike.

The machine's limits are measured before and after each run; a run is held against the mean of the two. A run in which
other processes took more than QUIET of the processors is kept, marked, and left out of the medians.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pellucid_benchmark.engines import Running
from pellucid_benchmark.processes import QUIET, Load, Worker, WorkerError, resident_mib, watching
from pellucid_benchmark.scenarios import Answer, Scenario
from pellucid_benchmark.shares import share_of_limit

Limits = dict[str, float]
"""read_gb_s, and gemm_FORMAT_gflop_s for float32, bfloat16 and int8."""


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
    share: float | None
    """Of the limit that the scenario meets; Pellucid's alone."""
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
    share: float | None
    samples: int
    quiet_samples: int


def measure(
    engines: Sequence[Running],
    limits: Worker,
    scenarios: Sequence[Scenario],
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All samples and limits of a model's runs. An engine that fails a scenario is left out of it, with why."""
    samples: list[Sample] = []
    machine: list[Limits] = []
    failures: dict[str, str] = {}
    memory: dict[str, float] = {}
    for engine in engines:
        for scenario in scenarios[:1]:
            with contextlib.suppress(WorkerError):  # Its first run will say so.
                _try(engine, scenario, -1)  # warm
        memory[engine.label] = resident_mib(engine.serving_pids)
        engine.sleep()
    for number in range(rounds):
        for scenario in scenarios:
            machine.append(limits.ask({}))
            # Everyone begins a round as often as the others: what the first run leaves behind is nobody's advantage.
            turn = number % len(engines)
            for engine in [*engines[turn:], *engines[:turn]]:
                key = f"{engine.label} {scenario.name}"
                if key in failures:
                    continue
                try:
                    answer, load = _run(engine, scenario, number)
                except WorkerError as error:
                    failures[key] = str(error)
                    say(f"{key}: {error}")
                    continue
                machine.append(limits.ask({}))
                samples.append(_sample(engine, scenario, number, answer, load, machine[-2:]))
                say(_line(samples[-1], load))
                memory[engine.label] = max(memory[engine.label], resident_mib(engine.serving_pids))
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
        shares = [sample.share for sample in counted if sample.share is not None]
        summaries.append(
            Summary(
                engine=engine,
                scenario=scenario,
                value=statistics.median(values),
                lowest=min(values),
                highest=max(values),
                first_ms=1000 * first,
                share=statistics.median(shares) if shares else None,
                samples=len(group),
                quiet_samples=len(quiet),
            )
        )
    return summaries


def _run(engine: Running, scenario: Scenario, number: int) -> tuple[Answer, Load]:
    engine.wake()
    try:
        _try(engine, scenario, -2 - number, new=1)  # back in the caches, at speed
        with watching(engine.pids) as load:
            answer = _try(engine, scenario, number)
    finally:
        engine.sleep()
    return answer, load


def _sample(
    engine: Running, scenario: Scenario, number: int, answer: Answer, load: Load, around: Sequence[Limits]
) -> Sample:
    value, share = scenario.value(answer), None
    if engine.server is not None and engine.costs is not None:
        limits = {key: statistics.mean(each[key] for each in around) for key in around[0]}
        share = share_of_limit(scenario, value, engine.costs, engine.server.precision, limits)
    return Sample(
        engine=engine.label,
        scenario=scenario.name,
        round=number,
        value=value,
        first_seconds=answer.first,
        foreign=load.foreign,
        own=load.own,
        share=share,
        ids=answer.ids,
    )


def _try(engine: Running, scenario: Scenario, number: int, new: int | None = None) -> Answer:
    prompts = scenario.prompts(engine.worker.about["vocab_size"], number)
    answer = engine.worker.ask({"prompts": prompts, "new": scenario.new_tokens if new is None else new})
    wanted = scenario.streams * (scenario.new_tokens if new is None else new)
    if answer["tokens"] != wanted:
        raise WorkerError(f"made {answer['tokens']} tokens, not {wanted}")
    return Answer(answer["first"], answer["last"], answer["tokens"], tuple(answer["ids"]))


def _line(sample: Sample, load: Load) -> str:
    return f"{sample.round + 1:3d}  {sample.scenario:15} {sample.engine:24} {sample.value:9.1f} tokens/s{load.remark}"
