"""What a check says: a verdict, the numbers it rests on, and what to do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["ok", "fault", "warning", "skipped"]
"""fault: something is wrong. warning: something may well be wrong, or is where it hurts. skipped: could not be looked
at."""


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Verdict
    evidence: str
    """The numbers; for a check that was skipped, why."""
    advice: str = ""
    """What to do; empty where there is nothing."""

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("fault", "warning")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        line = f"{self.verdict:8} {self.check}: {self.evidence}"
        return f"{line}\n         -> {self.advice}" if self.advice else line
