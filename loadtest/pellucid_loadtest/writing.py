"""The files of a report, in a folder of their own named after the time of writing.

report.json      the report
requests.jsonl   every record, warm-up included: the raw samples from which all figures can be computed again
report.html      the page for people, written last
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pellucid_loadtest.page import page
from pellucid_loadtest.records import Record
from pellucid_loadtest.report import Run, latency_samples


def write_report(report: dict[str, Any], run: Run, records: Sequence[Record], parent: Path) -> Path:
    """Writes the files and returns their folder. Raises OSError."""
    folder = _new_folder(parent)
    (folder / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as lines:
        for record in sorted(records, key=lambda record: record.index):
            lines.write(json.dumps(asdict(record), allow_nan=False) + "\n")
    measured = [record for record in records if run.measures(record.arrival)]
    samples = {name: [each * 1e3 for each in seconds] for name, seconds in latency_samples(measured).items()}
    (folder / "report.html").write_text(page(report, samples), encoding="utf-8")
    return folder


def _new_folder(parent: Path) -> Path:
    name = time.strftime("%Y-%m-%dT%H-%M-%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        folder = parent / f"{name}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent / name} and its next 999 names are taken")
