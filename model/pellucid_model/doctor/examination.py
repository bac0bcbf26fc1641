"""What is examined, and in which order.

In: a run's folder, a checkpoint, or a table of losses. Out: findings. A checkpoint that cannot be loaded is a finding
too; a path that is none of these is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pellucid_model.doctor.curve import Curve, examine_curve, read_curve
from pellucid_model.doctor.finding import Finding
from pellucid_model.doctor.insides import attention_choice, finite, positions_alike
from pellucid_model.doctor.leaks import future_leak, label_shift, looks_back, padding_leak
from pellucid_model.doctor.repetition import repetition
from pellucid_model.doctor.subject import Subject, load_subject
from pellucid_model.errors import ModelError
from pellucid_model.servable import load_servable
from pellucid_model.tokenizers import TokenizerError
from pellucid_model.training.corpus.cleaning import read_lines
from pellucid_model.training.errors import TrainingError
from pellucid_model.training.run import RunSettings, load_corpus, load_data
from pellucid_model.training.run_folder import RunFolder

_CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    future_leak,
    padding_leak,
    looks_back,
    label_shift,
    attention_choice,
    positions_alike,
    repetition,
)
_CURVES = (".csv", ".jsonl")


def examine(target: Path, module: str | None = None, corpus: Path | None = None) -> list[Finding]:
    """module: FILE.py:CLASS; corpus: text like that of the training. TrainingError for a path of another kind."""
    if not target.exists():
        names = ", ".join(_CURVES)
        raise TrainingError(f"{target}: no such folder or file; accepted: a run, a checkpoint, or a curve ({names})")
    lines = read_lines(corpus) if corpus is not None else None
    if target.suffix in _CURVES:
        return examine_curve(read_curve(target))
    if (target / "run.json").exists():
        return _examine_run(RunFolder.open(target), module, lines)
    return _examine_checkpoint(target, module, lines)


def _examine_run(run: RunFolder, module: str | None, lines: Sequence[str] | None) -> list[Finding]:
    model = run.settings.get("model") or {}
    vocab_size = run.settings.get("vocab_size")
    findings = examine_curve(Curve.of_records(run.records(), vocab_size, fine_tuned=bool(model.get("checkpoint"))))
    if not (run.checkpoint / "config.json").exists():
        return [*findings, Finding("checkpoint", "skipped", f"{run.path} has saved none yet")]
    if lines is None:
        try:
            settings = RunSettings.from_json(run.settings)
            lines = load_data(settings, load_corpus(settings.corpus, settings.recipe)).validation_lines
        except ModelError as error:
            findings.append(Finding("corpus", "skipped", f"the run's own text cannot be read again: {error}"))
    return findings + _examine_checkpoint(run.checkpoint, module or model.get("module"), lines)


def _examine_checkpoint(checkpoint: Path, module: str | None, lines: Sequence[str] | None) -> list[Finding]:
    try:
        subject = load_subject(checkpoint, module, lines)
    except (ModelError, TokenizerError) as error:
        return [Finding("loading", "fault", str(error), "it would not serve either; see docs/checkpoints.md")]
    findings = [finite(subject)]
    if not findings[0].is_wrong:
        findings += [check(subject) for check in _CHECKS]
    return findings if module is None else [*findings, _contract(checkpoint, module)]


def _contract(checkpoint: Path, module: str) -> Finding:
    """Whether a module of the user's own would be served."""
    try:
        notices = load_servable(checkpoint, module).notices
    except ModelError as error:
        return Finding("contract", "fault", str(error), "it will not serve before that is gone; docs/add-your-model.md")
    return Finding("contract", "ok", "; ".join(["it serves", *notices]))
