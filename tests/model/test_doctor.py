"""`pellucid doctor`: each fault is found where it is made, and a healthy model and run have none."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pellucid_model
from pellucid_model.doctor.cli import doctor_command
from pellucid_model.doctor.curve import Curve, examine_curve
from pellucid_model.doctor.finding import Finding
from pellucid_model.doctor.repetition import loop_period
from pellucid_model.training.cli import train_command
from pellucid_model.training.corpus.generator import generate_lines
from pellucid_testing import sick_models
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint
from pellucid_testing.sick_models import sick_checkpoint

DEMO = Path(pellucid_model.__file__).parent / "demo"
ALPHABET = "".join(sorted(CHARACTERS))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def examine(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, dict[str, Any]]]:
    """-> exit code, findings by check."""
    code = doctor_command([*map(str, arguments), "--json"])
    return code, {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}


def wrong(findings: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: f["verdict"] for name, f in findings.items() if f["verdict"] in ("fault", "warning")}


def test_the_bundled_model_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(generate_lines(2000, seed=1)[::100]), encoding="utf-8")
    assert doctor_command([str(DEMO), "--corpus", str(corpus)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 8
    assert lines[-1] == "nothing is wrong as far as 8 checks can tell"


def test_without_a_text_random_tokens_tell_all_but_the_labels(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = examine(capsys, DEMO)
    assert code == 0
    assert [name for name, f in findings.items() if f["verdict"] == "skipped"] == ["label shift"]


@pytest.mark.parametrize(
    ("kind", "check", "verdict", "evidence"),
    [
        ("Convolution", "future leak", "fault", "logits of token"),
        ("BatchMean", "padding leak", "fault", "beside another sequence"),
        ("Blind", "looking back", "fault", "move by 0.0e+00 with another token"),
        ("Unordered", "looking back", "fault", "in another order"),
        ("Uniform", "attention", "fault", "uniform in all heads: every layer"),
        ("OneHot", "attention", "fault", "one-hot in all heads: every layer"),
        ("SamePlaces", "positions alike", "fault", "predictions at different places differ by 0.00"),
        ("Overflow", "finite numbers", "fault", "norm is the first to give one"),
        ("BatchMean", "contract", "fault", "tokens meet outside attend"),
    ],
)
def test_a_fault_is_found(
    kind: str, check: str, verdict: str, evidence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, module = sick_checkpoint(tmp_path, getattr(sick_models, kind))
    code, findings = examine(capsys, folder, "--module", module)
    assert code == 1
    assert findings[check]["verdict"] == verdict
    assert evidence in findings[check]["evidence"]
    assert findings[check]["advice"]


def test_a_sound_module_of_ones_own_has_none_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, module = sick_checkpoint(tmp_path, sick_models.Sound)
    _, findings = examine(capsys, folder, "--module", module)
    assert set(wrong(findings)) <= {"repetition"}  # its weights are random
    assert len(findings) == 9
    assert findings["contract"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("kind", "verdict", "advice"),
    [
        ("Self", "fault", "labels were not shifted"),
        ("Skipping", "fault", "shifted more than once"),
        ("Counting", "ok", ""),
        ("Sound", "warning", "knows nothing of this text"),
    ],
)
def test_labels_are_held_against_their_neighbours(
    kind: str, verdict: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text counts on through the tokens, so that a module can say any of a token's neighbours."""
    corpus = tmp_path / "corpus.txt"
    characters = [c for c in ALPHABET if c != "\n"]
    corpus.write_text("".join(characters[2:30]) + "\n" + "".join(characters[10:]), encoding="utf-8")
    folder, module = sick_checkpoint(tmp_path, getattr(sick_models, kind))
    _, findings = examine(capsys, folder, "--module", module, "--corpus", corpus)
    assert findings["label shift"]["verdict"] == verdict
    assert advice in findings["label shift"]["advice"]


def test_a_model_that_says_the_token_itself_goes_round_in_circles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, module = sick_checkpoint(tmp_path, sick_models.Self)
    code, findings = examine(capsys, folder, "--module", module)
    assert code == 1
    assert findings["repetition"]["verdict"] == "warning"
    assert "4 of 4" in findings["repetition"]["evidence"]


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        ([7] * 12, 1),
        ([7] * 11, None),
        ([9, 8, 9, *[1, 2, 3] * 4], 3),
        ([1, 2, 3, 4, 5, 6, 7] * 3, 7),
        ([1, 2, 3, 4, 5, 6, 7] * 2, None),
        (list(range(40)), None),
        ([*[1, 2] * 20, 3], None),
    ],
)
def test_a_loop_is_a_stretch_that_the_end_repeats(tokens: list[int], period: int | None) -> None:
    assert loop_period(tokens) == period


def test_weights_that_are_not_finite_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["blocks.1.norm2.weight"][3] = math.nan
    save_file(tensors, folder / "model.safetensors")
    code, findings = examine(capsys, folder)
    assert code == 1
    ((name, finding),) = findings.items()
    assert name in ("finite numbers", "loading")  # the loader may refuse it first
    assert "blocks.1.norm2.weight" in finding["evidence"]


def test_a_checkpoint_that_does_not_load_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    code, findings = examine(capsys, tmp_path)
    assert code == 1
    assert "is not valid JSON" in findings["loading"]["evidence"]


def curve(losses: list[float], validation: list[float] | None = None, **known: Any) -> dict[str, Finding]:
    every = max(1, len(losses) // max(1, len(validation or [])))
    points = [(every * (i + 1), loss) for i, loss in enumerate(validation or [])]
    findings = examine_curve(Curve(list(enumerate(losses, start=1)), points, **known))
    return {finding.check: finding for finding in findings}


def falling(steps: int = 400, end: float = 1.0, noise: float = 0.08) -> list[float]:
    """From 7 nats towards `end`, as noisy as small batches are."""
    draw = random.Random(5)
    return [end + (7 - end) * math.exp(-8 * i / steps) + draw.gauss(0, noise) * (1 + i / steps) for i in range(steps)]


def test_a_healthy_curve_has_no_finding() -> None:
    findings = curve(falling(), [4.0, 2.0, 1.4, 1.2, 1.15, 1.16], vocab_size=1200)
    assert [f.verdict for f in findings.values()] == ["ok"] * 4


@pytest.mark.parametrize(
    ("losses", "validation", "check", "verdict", "evidence"),
    [
        (
            [*falling()[:200], 9.0, *falling()[200:]],
            [],
            "spikes",
            "warning",
            "1 in 401 steps; the largest at step 201: 9.000",
        ),
        ([7.0 + 0.01 * (i % 3) for i in range(200)], [], "learning", "fault", "7.010 at the end"),
        ([*falling()[:300], *[5.0] * 100], [], "learning", "fault", "the best stretch had"),
        ([*falling()[:50], math.nan], [], "finite loss", "fault", "not a number from step 51 on"),
        (falling(), [3.0, 1.5, 1.3, 1.6, 2.1], "over-fitting", "warning", "1.300 at step 240, 2.100 at step 400"),
    ],
    ids=["spike", "stuck", "rising", "nan", "over-fitting"],
)
def test_a_sick_curve_is_told(
    losses: list[float], validation: list[float], check: str, verdict: str, evidence: str
) -> None:
    findings = curve(losses, validation)
    assert findings[check].verdict == verdict
    assert evidence in findings[check].evidence
    assert {name for name, f in findings.items() if f.is_wrong} - {"spikes"} == {check} - {"spikes"}


def test_a_loss_near_that_of_guessing_is_stuck_however_it_began() -> None:
    losses = [9.0 - 0.01 * i if i < 200 else 7.0 for i in range(400)]
    assert not curve(losses)["learning"].is_wrong
    assert "guessing among 1,200 tokens gives 7.090" in curve(losses, vocab_size=1200)["learning"].evidence
    assert curve(losses, vocab_size=1200)["learning"].verdict == "fault"


def test_fine_tuning_may_gain_little() -> None:
    losses = [2.0 + 0.01 * (i % 3) for i in range(100)]
    assert curve(losses)["learning"].is_wrong
    assert not curve(losses, fine_tuned=True)["learning"].is_wrong


def test_a_curve_of_somebody_else_s_trainer_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "run.csv"
    losses = [*falling()[:200], 9.0, *falling()[200:]]
    rows = [f"{step},{loss},{'' if step % 100 else 1 + 100 / step}" for step, loss in enumerate(losses, start=1)]
    table.write_text("\n".join(["step,loss,validation_loss", *rows]))
    code, findings = examine(capsys, table)
    assert code == 1
    assert wrong(findings) == {"spikes": "warning"}
    assert findings["over-fitting"]["verdict"] == "ok"


TINY = """
    --preset demo --context-length 32 --d-model 16 --layers 2 --heads 2 --kv-heads 1 --head-dim 8 --d-ff 24
    --generated-lines 900 --max-line-length 30 --validation-lines 20 --rows 4 --steps 60 --warmup 5
    --validation-every 20 --device cpu --learning-rate 0.02
"""


def test_a_run_is_examined_with_its_own_held_out_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train_command([*TINY.split(), "--out", str(run)]) == 0
    capsys.readouterr()
    code, findings = examine(capsys, run)
    assert set(wrong(findings)) <= {"repetition", "attention"}  # 60 steps are few
    assert code == int(bool(wrong(findings)))
    assert "60 steps, 3 validations" in findings["finite loss"]["evidence"]
    assert findings["learning"]["verdict"] == findings["label shift"]["verdict"] == "ok"
    assert len(findings) == 12


def test_a_run_that_diverged_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = ["--learning-rate", "1000", "--warmup", "0", "--validation-every", "50"]
    assert train_command([*TINY.split(), *options, "--out", str(run)]) == 1
    capsys.readouterr()
    code, findings = examine(capsys, run)
    assert code == 1
    assert "training stopped at step" in findings["finite loss"]["evidence"]
    assert findings["checkpoint"]["verdict"] == "skipped"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder or file"),
        ([], "the following arguments are required"),
        ([str(DEMO), "--corpus", "none.txt"], "corpus none.txt cannot be read"),
        (["broken.jsonl"], "broken.jsonl, line 2: not a curve"),
        (["other.csv"], "other.csv: not a curve with step, loss and validation_loss"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text('{"step": 1, "loss": 2}\n{"st')
    Path("other.csv").write_text("time,loss\n1,2\n")
    try:
        code = doctor_command(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
