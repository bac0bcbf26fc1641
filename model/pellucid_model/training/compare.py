"""Lays two runs side by side: the settings in which they differ, and the best validation loss of each."""

from __future__ import annotations

from typing import Any

from pellucid_model.training.run_folder import RunFolder

Row = tuple[str, str, str]


def compare_runs(a: RunFolder, b: RunFolder) -> str:
    """A table with one row per setting that differs, and a last one with the best validation losses."""
    differences = _differences(_flat(a.settings), _flat(b.settings))
    rows = [("", str(a.path), str(b.path)), *differences, ("best validation loss", _best(a), _best(b))]
    if not differences:
        rows.insert(1, ("settings", "the same", "the same"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _differences(a: dict[str, str], b: dict[str, str]) -> list[Row]:
    names = [*a, *(name for name in b if name not in a)]
    pairs = [(name, a.get(name, "-"), b.get(name, "-")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = str(value)
    return flat


def _best(run: RunFolder) -> str:
    validations = run.validations()
    if not validations:
        return "none yet"
    best = min(validations, key=lambda record: float(record["validation_loss"]))
    return f"{best['validation_loss']:.4f} (step {best['step']:,})"
