"""`pellucid doctor`.

In: arguments. Out: findings on standard output, and an exit code: 0 nothing is wrong, 1 something is, 2 the arguments
cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pellucid_model.doctor.finding import Finding
from pellucid_model.errors import ModelError
from pellucid_model.one_line_parser import OneLineParser
from pellucid_model.training.cli import require_packages


def doctor_command(argv: list[str]) -> int:
    """The entry point; argv without the words `pellucid doctor`."""
    arguments = _parser().parse_args(argv)
    try:
        require_packages("torch", "safetensors")
        from pellucid_model.doctor.examination import examine

        findings = examine(arguments.target, arguments.module, arguments.corpus)
    except ModelError as error:
        print(f"pellucid doctor: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([finding.to_json() for finding in findings], ensure_ascii=False, indent=2))
    else:
        print("\n".join([*map(str, findings), _summary(findings)]))
    return int(any(finding.is_wrong for finding in findings))


def _summary(findings: list[Finding]) -> str:
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("fault", "warning", "skipped")}
    if not counts["fault"] and not counts["warning"]:
        skipped = f", {counts['skipped']} could not be made" if counts["skipped"] else ""
        return f"nothing is wrong as far as {len(findings) - counts['skipped']} checks can tell{skipped}"
    return f"faults: {counts['fault']}, warnings: {counts['warning']}"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="pellucid doctor",
        description="Look a model and its training over for the classic faults, and say what to do. "
        "Exit code 1: something is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "target", metavar="RUN|CHECKPOINT|CURVE", type=Path, help="folder of a run, a checkpoint, or a .csv or .jsonl"
    )
    parser.add_argument(
        "--module", metavar="FILE.py:CLASS", help="the checkpoint is of this module; the file is executed"
    )
    parser.add_argument(
        "--corpus",
        metavar="FILE",
        type=Path,
        help="UTF-8 text like that of the training, by lines (default: a run's held-out lines, else random tokens)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    return parser
