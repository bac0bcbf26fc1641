"""From records to the report: a dictionary that goes to report.json as it is; docs/load-testing.md describes it.

The window is the time from the end of the warm-up to the moment the run was told to stop. Latencies are those of
requests that arrived in the window. Rates count what happened in the window: tokens that came, requests that ended.
"""

from __future__ import annotations

import itertools
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from pellucid import __version__
from pellucid_loadtest.options import LoadOptions
from pellucid_loadtest.records import UNFINISHED, UNSENT, Record
from pellucid_loadtest.sending import Target
from pellucid_loadtest.summaries import concurrency, rates, summary

SCHEMA = "pellucid.loadtest/1"
BUCKETS = 60
"""Points of the series over time, at the most."""
SHORTEST_BUCKET = 0.25
FEWEST_FOR_P99 = 100


@dataclass(frozen=True)
class Run:
    """The frame of one run; times are seconds since the Unix epoch."""

    address: str
    users: int
    flags: dict[str, str]
    begun: float
    warm_until: float
    ended: float
    missing_processes: int = 0

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.ended - self.warm_until

    def measures(self, moment: float) -> bool:
        return self.warm_until <= moment < self.ended


def build_report(run: Run, options: LoadOptions, target: Target, records: Sequence[Record]) -> dict[str, Any]:
    """The whole report; every value is finite or None."""
    records = sorted(records, key=lambda record: (record.arrival, record.index))
    measured = [record for record in records if run.measures(record.arrival)]
    return {
        "schema": SCHEMA,
        "started_at": datetime.fromtimestamp(run.begun, UTC).isoformat(timespec="milliseconds"),
        "address": run.address,
        "users": run.users,
        "flags": run.flags,
        "server": target.server,
        "model": {key: value for key, value in asdict(target.model).items() if key != "eos_token_ids"},
        "load_generator": {
            "pellucid": __version__,
            "locust": version("locust"),
            "grpcio": version("grpcio"),
            "python": platform.python_version(),
        },
        "window": {
            "begin_s": run.warm_until - run.begun,
            "end_s": run.ended - run.begun,
            "duration_s": run.seconds,
        },
        "requests": _requests(records, measured),
        "failures": _failures(measured),
        "tokens": _tokens(measured),
        "latency_ms": _latencies(measured),
        "throughput": _throughput(run, options, records, measured),
        "concurrency": _concurrency(run, records),
        "slo": _slo(run, options, records, measured),
        "series": _series(run, records),
        "warnings": _warnings(run, records, measured),
    }


def _requests(records: Sequence[Record], measured: Sequence[Record]) -> dict[str, int]:
    return {
        "measured": len(measured),
        "ok": sum(record.ok for record in measured),
        "failed": sum(record.failed for record in measured),
        "unfinished": sum(record.code == UNFINISHED for record in measured),
        "unsent": sum(record.code == UNSENT for record in measured),
        "clipped": sum(record.clipped for record in measured),
        "not_measured": len(records) - len(measured),
    }


def _failures(measured: Sequence[Record]) -> list[dict[str, Any]]:
    """By gRPC status code and reason, the most frequent first, each with the first message that came."""
    failed = [record for record in measured if record.failed]
    counts = Counter((record.code, record.reason) for record in failed)
    examples = {(record.code, record.reason): record.message for record in reversed(failed)}
    return [
        {"code": code, "reason": reason or None, "count": count, "example": examples[code, reason]}
        for (code, reason), count in counts.most_common()
    ]


def _tokens(measured: Sequence[Record]) -> dict[str, Any]:
    ok = [record for record in measured if record.ok]
    messages, output = sum(len(record.token_counts) for record in ok), sum(record.output_tokens for record in ok)
    return {
        "prompt": asdict(summary(record.prompt_tokens for record in ok)),
        "output": asdict(summary(record.output_tokens for record in ok)),
        "per_message": output / messages if messages else None,
    }


def _latencies(measured: Sequence[Record]) -> dict[str, Any]:
    samples = latency_samples(measured)
    samples["dispatch_delay"] = [record.dispatch_delay for record in measured]
    return {
        name: asdict(summary(seconds * 1e3 for seconds in each)) for name, each in samples.items() if each is not None
    }


def latency_samples(measured: Sequence[Record]) -> dict[str, list[float]]:
    """In seconds, of the requests that ended OK."""
    ok = [record for record in measured if record.ok]
    return {
        "ttft": [each for record in ok if (each := record.ttft) is not None],
        "tpot": [each for record in ok if (each := record.tpot) is not None],
        "itl": [gap for record in ok for gap in record.itl],
        "e2e": [record.e2e for record in ok],
    }


def _throughput(
    run: Run, options: LoadOptions, records: Sequence[Record], measured: Sequence[Record]
) -> dict[str, float | None]:
    if run.seconds <= 0:
        return dict.fromkeys(["offered_requests_per_s", "requests_per_s", "output_tokens_per_s", "total_tokens_per_s"])
    output = sum(count for record in records for moment, count in _arrived(record) if run.measures(moment))
    prompts = sum(
        record.prompt_tokens for record in records if record.token_times and run.measures(record.token_times[0])
    )
    return {
        "offered_requests_per_s": len(measured) / run.seconds if options.open_loop else None,
        "requests_per_s": sum(record.ok and run.measures(record.ended) for record in records) / run.seconds,
        "output_tokens_per_s": output / run.seconds,
        "total_tokens_per_s": (output + prompts) / run.seconds,
    }


def _arrived(record: Record) -> list[tuple[float, int]]:
    """(time, tokens) of each message."""
    return list(zip(record.token_times, record.token_counts, strict=True))


def _concurrency(run: Run, records: Sequence[Record]) -> dict[str, Any]:
    seen = concurrency(((record.sent, record.ended) for record in records), run.warm_until, run.ended)
    return {"peak": seen.peak, "mean": seen.mean}


def meets(record: Record, options: LoadOptions) -> bool:
    """Whether a request is good: it ended OK and kept every SLO that is set. A time it does not have is kept."""
    limits = [(record.ttft, options.slo_ttft), (record.tpot, options.slo_tpot), (record.e2e, options.slo_e2e)]
    return record.ok and all(seconds is None or limit is None or seconds * 1e3 <= limit for seconds, limit in limits)


def _slo(run: Run, options: LoadOptions, records: Sequence[Record], measured: Sequence[Record]) -> dict[str, Any]:
    """Requests that failed, never ended or were never sent are not good."""
    targets = {"ttft": options.slo_ttft, "tpot": options.slo_tpot, "e2e": options.slo_e2e}
    good = sum(meets(record, options) for record in measured)
    good_ended = sum(meets(record, options) and run.measures(record.ended) for record in records)
    attainment = good / len(measured) if measured else None
    failure_ratio = sum(record.failed for record in measured) / len(measured) if measured else None
    any_ok = any(record.ok for record in measured)
    missed = _missed(run, options, any_ok, any(targets.values()), attainment, failure_ratio)
    return {
        "targets_ms": targets,
        "good": good,
        "goodput_requests_per_s": good_ended / run.seconds if run.seconds > 0 else None,
        "attainment": attainment,
        "required_attainment": options.slo_attainment,
        "failure_ratio": failure_ratio,
        "max_failure_ratio": options.max_failure_ratio,
        "missed": missed,
        "passed": not missed,
    }


def _missed(
    run: Run,
    options: LoadOptions,
    any_ok: bool,
    has_targets: bool,
    attainment: float | None,
    failure_ratio: float | None,
) -> list[str]:
    """One sentence for each thing that was asked for and not kept."""
    if attainment is None or failure_ratio is None:
        return ["no request was measured"]
    missed = [] if any_ok else ["no request ended OK"]
    if has_targets and attainment < options.slo_attainment:
        missed.append(f"{attainment:.2%} of the requests are good, and {options.slo_attainment:.2%} must be")
    if failure_ratio > options.max_failure_ratio:
        missed.append(f"{failure_ratio:.2%} of the requests failed, and {options.max_failure_ratio:.2%} may")
    if run.missing_processes:
        missed.append("the records of some worker processes are missing")
    return missed


def _series(run: Run, records: Sequence[Record]) -> dict[str, Any]:
    """Over the whole run, warm-up included; times are seconds after its begin."""
    seconds = run.ended - run.begun
    bucket = seconds / max(1, min(BUCKETS, int(seconds / SHORTEST_BUCKET)))
    span = (run.begun, run.ended, bucket)
    steps = concurrency(((record.sent, record.ended) for record in records), run.begun, run.ended).steps
    return {
        "bucket_s": bucket,
        "requests_per_s": rates(((record.ended, 1) for record in records if record.ok), *span),
        "failures_per_s": rates(((record.ended, 1) for record in records if record.failed), *span),
        "output_tokens_per_s": rates((each for record in records for each in _arrived(record)), *span),
        "concurrency": _peaks(steps, run, bucket),
    }


def _peaks(steps: Sequence[tuple[float, int]], run: Run, bucket: float) -> list[int]:
    """The most requests in flight in each bucket."""
    peaks = [0] * len(rates((), run.begun, run.ended, bucket))
    for (start, number), (stop, _) in itertools.pairwise([*steps, (run.ended, 0)]):
        first, last = int((start - run.begun) / bucket), int((stop - run.begun) / bucket)
        for index in range(max(0, first), min(last, len(peaks) - 1) + 1):
            peaks[index] = max(peaks[index], number)
    return peaks


def _warnings(run: Run, records: Sequence[Record], measured: Sequence[Record]) -> list[str]:
    counts = _requests(records, measured)
    notes = {
        "not ended when the drain was over, and left out of the latencies, which look better than they are for it; "
        "--drain gives them longer": counts["unfinished"],
        "never sent, because no user was free; --concurrency gives more": counts["unsent"],
        "shortened to fit the model's context or the server's output limit": counts["clipped"],
    }
    warnings = [f"requests {note}: {count}" for note, count in notes.items() if count]
    if 0 < counts["ok"] < FEWEST_FOR_P99:
        warnings.append(f"p99 of fewer than {FEWEST_FOR_P99} requests is close to their maximum; run longer")
    if run.missing_processes:
        warnings.append(f"worker processes that did not send their records: {run.missing_processes}")
    return warnings
