"""The report from records whose figures can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pellucid_loadtest.console import table
from pellucid_loadtest.options import FLAGS, LoadOptions
from pellucid_loadtest.records import UNFINISHED, UNSENT, Record, packed, unpacked
from pellucid_loadtest.report import Run, build_report
from pellucid_loadtest.sending import Target
from pellucid_loadtest.workloads import ModelShape
from pellucid_loadtest.writing import write_report

MakeOptions = Callable[..., LoadOptions]
RUN = Run(
    address="127.0.0.1:1",
    users=2,
    flags={flag.name: flag.default for flag in FLAGS},
    begun=1000.0,
    warm_until=1002.0,
    ended=1012.0,
)


def record(index: int, arrival: float, **changes: object) -> Record:
    """OK, first token after 0.1 s, then four messages of one token every 0.05 s; 0.4 s in all."""
    times = tuple(arrival + 0.1 + 0.05 * step for step in range(5))
    values: dict[str, object] = {
        "index": index,
        "arrival": arrival,
        "sent": arrival,
        "ended": arrival + 0.4,
        "code": "OK",
        "reason": "",
        "message": "",
        "prompt_tokens": 10,
        "clipped": False,
        "token_times": times,
        "token_counts": (1,) * 5,
    }
    return Record(**{**values, **changes})  # type: ignore[arg-type]


def failed(index: int, arrival: float, code: str = "UNAVAILABLE") -> Record:
    return record(index, arrival, code=code, message=f"{code} at {index}", token_times=(), token_counts=())


@pytest.fixture
def target(model: ModelShape) -> Target:
    return Target(model, {"version": "1.2.3"})


def test_times_of_one_request() -> None:
    one = record(0, 5.0, sent=5.03, token_counts=(1, 1, 2, 2, 2))
    assert one.ttft == pytest.approx(0.1), "an open loop's time runs from the arrival"
    assert one.e2e == pytest.approx(0.4)
    assert one.dispatch_delay == pytest.approx(0.03)
    assert one.tpot == pytest.approx(0.2 / 7)
    assert one.itl == pytest.approx([0.05] * 4)
    assert one.output_tokens == 8
    bare = failed(1, 5.0)
    assert (bare.ttft, bare.tpot, bare.itl) == (None, None, [])


def test_records_survive_the_way_between_processes() -> None:
    records = [record(0, 1.0), failed(1, 2.0)]
    assert unpacked(json.loads(json.dumps(packed(records)))) == records


def test_the_warm_up_is_left_out(make_options: MakeOptions, target: Target) -> None:
    slow = record(0, 1000.5, ended=1001.9)
    report = build_report(RUN, make_options(), target, [slow, failed(1, 1001.0), record(2, 1003.0)])
    assert report["requests"] == {
        "measured": 1,
        "ok": 1,
        "failed": 0,
        "unfinished": 0,
        "unsent": 0,
        "clipped": 0,
        "not_measured": 2,
    }
    assert report["latency_ms"]["e2e"]["max"] == pytest.approx(400)
    assert report["throughput"]["requests_per_s"] == pytest.approx(0.1)
    assert report["failures"] == []
    assert report["slo"]["passed"]


def test_rates_count_what_happened_in_the_window(make_options: MakeOptions, target: Target) -> None:
    """A request across an edge gives the window those of its tokens that came inside."""
    across_begin, across_end = record(0, 1001.8), record(1, 1011.85)
    report = build_report(RUN, make_options(), target, [across_begin, across_end])
    inside = sum(1002.0 <= moment < 1012.0 for each in (across_begin, across_end) for moment in each.token_times)
    assert 0 < inside < 10
    throughput = report["throughput"]
    assert throughput["output_tokens_per_s"] == pytest.approx(inside / 10)
    assert throughput["requests_per_s"] == pytest.approx(1 / 10)
    assert throughput["total_tokens_per_s"] == pytest.approx((inside + 10) / 10)


def test_goodput_counts_requests_that_keep_every_slo(make_options: MakeOptions, target: Target) -> None:
    late = record(1, 1004.0, token_times=tuple(1004.3 + 0.01 * step for step in range(5)))
    slow = record(2, 1005.0, token_times=tuple(1005.1 + 0.2 * step for step in range(5)), ended=1006.5)
    records = [record(0, 1003.0), late, slow, failed(3, 1006.0)]
    options = make_options(slo_ttft="150", slo_tpot="60", max_failure_ratio="0.5", slo_attainment="0.25")
    slo = build_report(RUN, options, target, records)["slo"]
    assert (slo["good"], slo["attainment"], slo["goodput_requests_per_s"]) == (1, 0.25, pytest.approx(0.1))
    assert slo["passed"]
    stricter = build_report(RUN, make_options(slo_ttft="150", max_failure_ratio="0.5"), target, records)["slo"]
    assert (stricter["good"], stricter["passed"]) == (2, False)
    assert stricter["missed"] == ["50.00% of the requests are good, and 99.00% must be"]
    e2e = build_report(RUN, make_options(slo_e2e="450", max_failure_ratio="1"), target, records)["slo"]
    assert e2e["good"] == 2


def test_what_never_ended_is_not_good(make_options: MakeOptions, target: Target) -> None:
    records = [
        record(0, 1003.0),
        record(1, 1004.0, code=UNFINISHED),
        record(2, 1005.0, code=UNSENT, token_times=(), token_counts=()),
    ]
    report = build_report(RUN, make_options(slo_ttft="1000"), target, records)
    assert report["slo"]["attainment"] == pytest.approx(1 / 3)
    assert report["requests"]["failed"] == 0
    assert not report["slo"]["passed"]
    assert sum("--drain" in note or "--concurrency" in note for note in report["warnings"]) == 2
    hung = build_report(RUN, make_options(), target, records[1:2])
    assert hung["slo"]["missed"] == ["no request ended OK"]


def test_failures_are_counted_by_code_and_reason(make_options: MakeOptions, target: Target) -> None:
    full = record(4, 1006.0, code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL", message="full")
    records = [record(0, 1003.0), failed(1, 1004.0), failed(2, 1005.0), full]
    report = build_report(RUN, make_options(), target, records)
    assert [(each["code"], each["reason"], each["count"], each["example"]) for each in report["failures"]] == [
        ("UNAVAILABLE", None, 2, "UNAVAILABLE at 1"),
        ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 1, "full"),
    ]
    assert report["slo"]["failure_ratio"] == 0.75
    assert report["slo"]["missed"] == ["75.00% of the requests failed, and 0.00% may"]
    assert build_report(RUN, make_options(max_failure_ratio="0.75"), target, records)["slo"]["passed"]


def test_no_measured_request_is_no_pass(make_options: MakeOptions, target: Target) -> None:
    report = build_report(RUN, make_options(), target, [record(0, 1000.5)])
    assert report["slo"]["missed"] == ["no request was measured"]


def test_concurrency_and_series(make_options: MakeOptions, target: Target) -> None:
    records = [record(0, 1003.0), record(1, 1003.1), record(2, 1003.2), record(3, 1008.0)]
    report = build_report(RUN, make_options(), target, records)
    assert report["concurrency"]["peak"] == 3
    series = report["series"]
    buckets = {len(each) for each in series.values() if isinstance(each, list)}
    assert buckets == {48}, "12 s in buckets of 0.25 s"
    assert max(series["concurrency"]) == 3
    assert sum(series["output_tokens_per_s"]) * series["bucket_s"] == pytest.approx(20)


class _Page(HTMLParser):
    """Which tags a page has, and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data", "xlink:href")]


def test_the_files(make_options: MakeOptions, target: Target, tmp_path: Path) -> None:
    records = [*(record(index, 1003.0 + index) for index in range(5)), failed(9, 1009.0, "<b>")]
    report = build_report(RUN, make_options(slo_ttft="200"), target, records)
    folder, second = (write_report(report, RUN, records, tmp_path) for _ in range(2))
    assert folder != second
    assert json.loads((folder / "report.json").read_text()) == report
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4, 9]
    assert rows[0]["token_times"] == list(records[0].token_times)
    page = _Page()
    page.feed(text := (folder / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 7
    assert "script" not in page.tags
    assert all(value is not None and value.startswith("#") for value in page.fetched), "nothing is fetched"
    assert "<b>" not in text
    for words in ("Distribution of TTFT", "Distribution of ITL", "Distribution of E2E", "Output tokens over time"):
        assert words in text
    assert "time to first token" in table(report)
