"""docs/load-testing.md names every flag with its default, and every key of the files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from pellucid_loadtest.options import FLAGS, LoadOptions
from pellucid_loadtest.records import Record
from pellucid_loadtest.report import SCHEMA, Run, build_report
from pellucid_loadtest.sending import Target
from pellucid_loadtest.workloads import OUTPUT_LENGTHS, PROMPT_LENGTHS, ModelShape

DOC = (Path(__file__).parents[2] / "docs/load-testing.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading."""
    table = DOC[DOC.index(f"{heading}\n") :].split("\n|", 1)[1].split("\n\n")[0]
    lines = f"|{table}".splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_flags() -> None:
    documented = {cells[0]: cells[1].strip("`") for cells in rows("## Flags")}
    assert documented == {f"`--{flag.name}`": flag.default for flag in FLAGS}


def test_workloads() -> None:
    for name, prompt, output in rows("## Workloads"):
        assert PROMPT_LENGTHS[name.strip("`")] in prompt
        assert OUTPUT_LENGTHS[name.strip("`")] in output
    assert len(rows("## Workloads")) == len(PROMPT_LENGTHS) == len(OUTPUT_LENGTHS)


def test_report(make_options: Callable[..., LoadOptions], model: ModelShape) -> None:
    run = Run("127.0.0.1:1", 1, {}, begun=0.0, warm_until=0.0, ended=1.0)
    report = build_report(run, make_options(), Target(model, {}), [])
    assert f"`{SCHEMA}`" in DOC
    documented = {key: cells[1] for cells in rows("### report.json") for key in re.findall(r"`(\w+)`", cells[0])}
    assert set(documented) == set(report)
    for key in ("model", "load_generator", "window", "requests", "tokens", "latency_ms", "throughput", "series"):
        assert all(f"`{name}`" in documented[key] for name in report[key]), key
    for key in ("concurrency", "slo"):
        assert all(f"`{name}`" in documented[key] for name in report[key]), key


def test_requests() -> None:
    documented = [key for cells in rows("### requests.jsonl") for key in re.findall(r"`(\w+)`", cells[0])]
    assert documented == [field.name for field in fields(Record)]
