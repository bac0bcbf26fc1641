"""`pellucid train` on tiny models: its files, resume, interruption, divergence, comparison, errors."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid_model.checkpoint import load_checkpoint
from pellucid_model.tokenizers import load_tokenizer
from pellucid_model.training.cli import train_command
from pellucid_model.training.run_folder import Record, RunFolder

TINY = """
    --preset demo --context-length 32 --d-model 16 --layers 2 --heads 2 --kv-heads 1 --head-dim 8 --d-ff 24
    --dropout 0.1 --generated-lines 900 --max-line-length 30 --validation-lines 20 --rows 2 --steps 12 --warmup 3
    --validation-every 5 --device cpu --sample-prompts 今天 龘龘
"""


def train(path: Path, *options: str) -> int:
    return train_command([*TINY.split(), "--out", str(path), *options])


def act_at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """Do something right after this training step has been logged."""
    append = RunFolder.append

    def append_and_act(run: RunFolder, record: Record) -> None:
        append(run, record)
        if record["step"] == step and "loss" in record:
            act()

    monkeypatch.setattr(RunFolder, "append", append_and_act)


def curve(path: Path) -> list[Record]:
    """The log without its times."""
    records = RunFolder.open(path).records()
    return [{name: value for name, value in r.items() if not name.endswith("seconds")} for r in records]


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, optimiser, random state and loss curve are equal bit for bit."""
    states = [RunFolder.open(path).load_state() for path in (a, b)]
    _assert_equal(states[0], states[1])
    weights = "checkpoint/model.safetensors"
    assert (a / weights).read_bytes() == (b / weights).read_bytes()
    assert curve(a) == curve(b)
    assert (a / "samples.txt").read_text() == (b / "samples.txt").read_text()


def _assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _assert_equal(x, y)
    else:
        assert a == b


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert train(path) == 0
    return path


def test_a_run_leaves_its_files(whole: Path) -> None:
    assert {p.name for p in whole.iterdir()} == {
        "run.json",
        "log.jsonl",
        "loss.png",
        "samples.txt",
        "state.pt",
        "checkpoint",
    }
    assert {p.name for p in (whole / "checkpoint").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_samples_continue_the_prompts_whose_characters_are_known(whole: Path) -> None:
    text = (whole / "samples.txt").read_text(encoding="utf-8")
    assert "step 10, validation loss" in text
    assert text.count("今天|") == 3 * 2
    assert "龘" not in text


def test_run_json_says_what_was_run(whole: Path) -> None:
    settings = json.loads((whole / "run.json").read_text())
    assert settings["preset"] == "demo"
    assert settings["recipe"]["d_model"] == 16
    assert settings["recipe"]["seed"] == 1234
    assert settings["versions"]["torch"] == torch.__version__
    assert settings["threads"] == 1


def test_the_log_has_every_step_and_every_validation(whole: Path) -> None:
    records = RunFolder.open(whole).records()
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 13))
    assert [r["step"] for r in records if "validation_loss" in r] == [5, 10, 12]
    assert all(r["gradient_norm"] > 0 and r["learning_rate"] > 0 and r["tokens"] == 64 for r in records if "loss" in r)


def test_the_checkpoint_loads_strictly_and_has_its_tokenizer(whole: Path) -> None:
    checkpoint = load_checkpoint(whole / "checkpoint")
    tokenizer = load_tokenizer(whole / "checkpoint")
    assert checkpoint.dtype == torch.bfloat16
    assert tokenizer is not None
    assert checkpoint.config.vocab_size == tokenizer.vocab_size
    generation = json.loads((whole / "checkpoint/generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (tokenizer.bos_id, list(tokenizer.eos_ids))


def test_the_same_seed_gives_the_same_run(whole: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "again") == 0
    assert_same_run(whole, tmp_path / "again")


def test_another_seed_gives_another_run(whole: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "other", "--seed", "1") == 0
    assert curve(tmp_path / "other") != curve(whole)


@pytest.mark.parametrize("step", [1, 5, 7])
def test_ctrl_c_saves_and_a_resumed_run_ends_as_if_nothing_had_happened(
    step: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        act_at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        assert train(path) == 130
    assert f"interrupted and saved; go on with: pellucid train --resume --out {path}" in capsys.readouterr().err
    assert RunFolder.open(path).load_state()["step"] == step
    load_checkpoint(path / "checkpoint")
    assert train_command(["--resume", "--out", str(path)]) == 0
    assert_same_run(whole, path)


def test_a_crash_loses_only_what_was_not_saved(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "crashed"

    def crash() -> None:
        raise RuntimeError("the power is gone")

    with monkeypatch.context() as patch:
        act_at_step(patch, 8, crash)
        with pytest.raises(RuntimeError, match="power"):
            train(path)
    with (path / "log.jsonl").open("a") as log:
        log.write('{"step": 9, "lo')  # cut short
    assert RunFolder.open(path).load_state()["step"] == 5
    assert train_command(["--resume", "--out", str(path)]) == 0
    assert_same_run(whole, path)


def test_a_second_ctrl_c_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    act_at_step(monkeypatch, 7, press_twice)
    assert train(tmp_path / "run") == 130
    assert "interrupted without saving" in capsys.readouterr().err
    assert RunFolder.open(tmp_path / "run").load_state()["step"] == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_resuming_a_finished_run_changes_nothing(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = (whole / "checkpoint/model.safetensors").read_bytes()
    assert train(whole, "--resume") == 0
    assert "after step 12 of 12" in capsys.readouterr().out
    assert (whole / "checkpoint/model.safetensors").read_bytes() == weights


def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        act_at_step(patch, 7, lambda: signal.raise_signal(signal.SIGINT))
        assert train(path) == 130
    run = RunFolder.open(path)
    state = run.load_state()
    state["model"]["embedding.weight"][:] = float("nan")
    run.save_state(state)
    before = {p: p.read_bytes() for p in [path / "state.pt", *(path / "checkpoint").iterdir()]}
    capsys.readouterr()

    assert train_command(["--resume", "--out", str(path)]) == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("pellucid train: training stopped at step 8: loss nan, gradient norm nan, learning rate")
    assert "try a lower --learning-rate" in message
    assert message.endswith(f"the last good checkpoint is kept in {path / 'checkpoint'}")
    assert "\n" not in message
    assert {p: p.read_bytes() for p in before} == before


def test_a_learning_rate_far_too_high_ends_in_the_same_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--learning-rate", "1000", "--warmup", "0", "--steps", "50", "--validation-every", "50"]
    assert train(tmp_path / "run", *options) == 1
    message = capsys.readouterr().err
    assert "training stopped at step" in message
    assert "loss nan, gradient norm nan" in message
    assert "last good checkpoint" not in message  # there is none
    assert not (tmp_path / "run/checkpoint").exists()


def test_compare_prints_differences_only_and_the_best_losses(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert train(other, "--learning-rate", "0.01") == 0
    capsys.readouterr()
    assert train_command(["compare", str(whole), str(other)]) == 0
    table = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[1:] for line in table.splitlines()[1:]}
    assert list(rows) == ["recipe.learning_rate", "best validation loss"]
    assert rows["recipe.learning_rate"] == ["0.004", "0.01"]
    for path in (whole, other):
        best = min(r["validation_loss"] for r in RunFolder.open(path).validations())
        assert f"{best:.4f}" in table.splitlines()[-1]


def test_compare_says_where_nothing_differs(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_command(["compare", str(whole), str(whole)]) == 0
    assert "the same" in capsys.readouterr().out


def test_the_corpus_command_writes_lines_that_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "corpus.txt"
    assert train_command(["corpus", "--out", str(file), "--lines", "900"]) == 0
    assert "900 of 900 lines kept" in capsys.readouterr().out
    assert len(file.read_text(encoding="utf-8").splitlines()) == 900
    assert train(tmp_path / "from_file", "--corpus", str(file), "--steps", "2") == 0
    file.write_text("今天天气不错。\n" * 50, encoding="utf-8")
    assert train_command(["--resume", "--out", str(tmp_path / "from_file")]) == 2
    assert "the corpus is not the one that the run began with" in capsys.readouterr().err


def test_the_study_note_runs_in_its_own_layout(tmp_path: Path) -> None:
    shape = "--d-model 16 --layers 1 --heads 2 --kv-heads 2 --head-dim 8 --d-ff 24 --generated-lines 900"
    options = f"--preset study-note {shape} --validation-lines 20 --steps 2 --out {tmp_path / 'run'}"
    assert train_command(options.split()) == 0
    assert load_checkpoint(tmp_path / "run/checkpoint").config.position == "sinusoidal"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "--preset is needed: study-note, demo, fine-tune"),
        (["--preset", "large"], 2, "argument --preset: invalid choice: 'large'"),
        (["--preset", "demo", "--steps", "many"], 2, "argument --steps: invalid int value: 'many'"),
        (["--preset", "demo", "--steps", "0"], 2, "steps = 0: must be at least 1"),
        (["--preset", "demo", "--threads", "0"], 2, "argument --threads: 0: must be at least 1"),
        (["--preset", "demo", "--colour", "red"], 2, "unrecognized arguments: --colour red"),
        (["--preset", "demo", "--corpus", "none.txt"], 2, "none.txt cannot be read: No such file or directory"),
        (["--preset", "demo", "--generated-lines", "3"], 2, "corpus lines = 3: must be between 745 and 170000"),
        (["--resume"], 2, "--resume needs --out"),
        (["--resume", "--out", "nowhere"], 2, "nowhere holds no run: run.json is missing"),
        (["compare", "nowhere", "elsewhere"], 2, "nowhere holds no run: run.json is missing"),
        (["compare", "nowhere"], 2, "the following arguments are required: RUN_B"),
        (["corpus"], 2, "the following arguments are required: --out"),
        (["corpus", "--out", "no/such/folder/file"], 1, "no/such/folder/file: No such file or directory"),
    ],
)
def test_errors_are_one_line(
    options: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_command(options) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(whole) == 2
    assert "holds a run already; go on with --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--steps", "20"], "steps = 20: the run to resume was begun with 12, which cannot change"),
        (["--threads", "2"], "threads = 2: the run to resume was begun with 1, which cannot change"),
        (
            ["--corpus", "/x.txt"],
            "corpus = '/x.txt': the run to resume was begun with 'generated', which cannot change",
        ),
    ],
)
def test_a_resumed_run_keeps_its_settings(
    option: list[str], message: str, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_command(["--resume", "--out", str(whole), *option]) == 2
    assert message in capsys.readouterr().err


def test_a_broken_state_is_named(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "run.json").write_bytes((whole / "run.json").read_bytes())
    assert train_command(["--resume", "--out", str(path)]) == 2
    assert "state.pt is missing" in capsys.readouterr().err
    (path / "state.pt").write_bytes((whole / "state.pt").read_bytes()[:1000])
    assert train_command(["--resume", "--out", str(path)]) == 2
    assert "state.pt is broken" in capsys.readouterr().err


def test_help_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_command(["--help"]) == 0
    assert "--learning-rate" in capsys.readouterr().out
