"""The report as text for a terminal."""

from __future__ import annotations

from typing import Any

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
}
COLUMNS = ("mean", "median", "p90", "p95", "p99", "max")


def table(report: dict[str, Any]) -> str:
    """Everything that decides, on one screen."""
    requests, window, model = report["requests"], report["window"], report["model"]
    flags = report["flags"]
    lines = [
        "",
        f"{flags['workload']} requests, {flags['arrivals']} arrivals, {report['users']} users, "
        f"{window['duration_s']:.1f} s measured, model {model['name']} at {report['address']}",
        "",
        f"  {'milliseconds':<24}" + "".join(f"{column:>10}" for column in COLUMNS),
    ]
    for name, words in LATENCIES.items():
        values = report["latency_ms"][name]
        lines.append(f"  {words:<24}" + "".join(f"{number(values[column]):>10}" for column in COLUMNS))
    lines += ["", *(f"  {name:<24}{value}" for name, value in totals(report))]
    lines += [
        f"  failed: {each['count']} x {each['code']} {each['reason'] or ''}  {each['example']}"
        for each in report["failures"]
    ]
    lines += [f"  note: {warning}" for warning in report["warnings"]]
    lines += ["", verdict(report), f"  requests: {_counts(requests)}"]
    return "\n".join(lines)


def totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that are not latencies, as (name, value with unit)."""
    throughput, slo, concurrency = report["throughput"], report["slo"], report["concurrency"]
    rows = [
        ("requests", f"{number(throughput['requests_per_s'])} /s"),
        ("goodput", f"{number(slo['goodput_requests_per_s'])} requests/s"),
        ("output tokens", f"{number(throughput['output_tokens_per_s'])} /s"),
        ("prompt + output tokens", f"{number(throughput['total_tokens_per_s'])} /s"),
        ("in flight", f"{number(concurrency['mean'])} on average, {concurrency['peak']} at the peak"),
    ]
    if throughput["offered_requests_per_s"] is not None:
        delay = report["latency_ms"]["dispatch_delay"]
        rows.insert(0, ("offered requests", f"{number(throughput['offered_requests_per_s'])} /s"))
        rows.append(("waited for a user", f"p99 {number(delay['p99'])} ms"))
    return rows


def verdict(report: dict[str, Any]) -> str:
    slo = report["slo"]
    targets = ", ".join(f"{name.upper()} <= {limit:g} ms" for name, limit in slo["targets_ms"].items() if limit)
    asked = f"{slo['required_attainment']:.2%} with {targets}; " if targets else "no SLO set; "
    asked += f"failures <= {slo['max_failure_ratio']:.2%}"
    if slo["passed"]:
        kept = "" if not targets else f": {slo['attainment']:.2%} are good"
        return f"PASSED ({asked}){kept}"
    return f"MISSED ({asked}): {'; '.join(slo['missed'])}"


def number(value: float | None) -> str:
    """About four digits; a dash where there is nothing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _counts(requests: dict[str, int]) -> str:
    named = ("measured", "ok", "failed", "unfinished", "unsent")
    counted = ", ".join(f"{requests[name]} {name}" for name in named if requests[name] or name in ("measured", "ok"))
    return f"{counted}; {requests['not_measured']} in the warm-up"
