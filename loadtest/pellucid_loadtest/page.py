"""The report as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from pellucid_loadtest.charts import COLOURS, cdf, over_time
from pellucid_loadtest.console import COLUMNS, LATENCIES, number, totals, verdict

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: #1f2937 }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { padding: .25rem .8rem; border-bottom: 1px solid #e5e7eb }
td { text-align: right; font-variant-numeric: tabular-nums } th, td.text { text-align: left; font-weight: normal }
thead th { color: #6b7280; text-align: right } thead th:first-child { text-align: left }
.verdict { padding: .5rem .8rem; border-left: 4px solid; background: #f9fafb }
.passed { border-color: #059669 } .missed { border-color: #dc2626 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem }
svg { width: 100%; height: auto }
"""


def page(report: dict[str, Any], samples_ms: Mapping[str, Sequence[float]]) -> str:
    """HTML of the report; `samples_ms` are the raw latencies behind the curves."""
    title = f"Load test of {report['model']['name']}, {report['started_at']}"
    passed = "passed" if report["slo"]["passed"] else "missed"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {passed}">{escape(verdict(report))}</p>',
        *(f"<p>Note: {escape(warning)}</p>" for warning in report["warnings"]),
        "<h2>Latency in milliseconds</h2>",
        _table(("", *COLUMNS), [(words, *_latency(report, name)) for name, words in LATENCIES.items()]),
        "<h2>Throughput</h2>",
        _table((), totals(report)),
        "<h2>Requests</h2>",
        _table((), [(name.replace("_", " "), str(count)) for name, count in report["requests"].items()]),
        *_failures(report),
        '<h2>Plots</h2><div class="charts">',
        *(f"<figure>{chart}</figure>" for chart in _charts(report, samples_ms)),
        "</div><h2>Flags</h2>",
        _table((), report["flags"].items(), text=True),
        "<h2>Server and load generator</h2>",
        _table((), [("address", report["address"]), *report["server"].items()], text=True),
        _table((), report["load_generator"].items(), text=True),
    ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    return f"{head}<style>{STYLE}</style></head><body>\n{chr(10).join(parts)}\n</body></html>\n"


def _latency(report: dict[str, Any], name: str) -> list[str]:
    return [number(report["latency_ms"][name][column]) for column in COLUMNS]


def _failures(report: dict[str, Any]) -> list[str]:
    if not report["failures"]:
        return []
    rows = [(each["code"], each["reason"] or "", str(each["count"]), each["example"]) for each in report["failures"]]
    return ["<h2>Failures</h2>", _table(("code", "reason", "count", "example"), rows, text=True)]


def _charts(report: dict[str, Any], samples_ms: Mapping[str, Sequence[float]]) -> list[str]:
    limits, series = report["slo"]["targets_ms"], report["series"]
    warm_until, bucket = report["window"]["begin_s"], series["bucket_s"]
    over = {
        "output_tokens_per_s": ("Output tokens over time", "tokens/s", "#2563eb"),
        "requests_per_s": ("Requests ended over time", "requests/s", "#059669"),
        "concurrency": ("Requests in flight", "requests", "#7c3aed"),
        "failures_per_s": ("Failures over time", "failures/s", "#dc2626"),
    }
    return [
        *(
            cdf(f"Distribution of {name.upper()}", samples_ms[name], limits.get(name), colour)
            for name, colour in COLOURS.items()
        ),
        *(
            over_time(title, unit, series[name], bucket, warm_until, colour)
            for name, (title, unit, colour) in over.items()
            if name != "failures_per_s" or any(series[name])
        ),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, text: bool = False) -> str:
    """The first column is a heading; the others are right-aligned numbers, or text."""
    kind = ' class="text"' if text else ""
    header = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join(
        f"<tr><th>{escape(str(first))}</th>{''.join(f'<td{kind}>{escape(str(each))}</td>' for each in rest)}</tr>"
        for first, *rest in rows
    )
    return f"<table>{f'<thead><tr>{header}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
