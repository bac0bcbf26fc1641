"""The check of a GPU, tried where there is none: its parts on the CPU, and what it makes of what they find."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_check
from pellucid_benchmark.gpu import correctness
from pellucid_benchmark.gpu.__main__ import findings
from pellucid_benchmark.gpu.shapes import SHAPES, weight_count
from pellucid_benchmark.gpu.stack import random_decoder
from pellucid_server.engine.varlen import TWIN

CPU = torch.device("cpu")


def in_process(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """What gpu_check.run gives, without the seconds that a process takes to import torch."""
    *_, part, device = command
    with torch.inference_mode():
        found = list(findings(part, torch.device(device)))
    return {"findings": json.loads(json.dumps(found)), "seconds": 0.1, "error": None}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the check's own processes do on a CPU
    monkeypatch.setattr(gpu_check, "run", in_process)
    monkeypatch.setattr(correctness, "LENGTHS", (1, 9))
    monkeypatch.setattr(correctness, "NEW_TOKENS", 3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("quick")
def test_every_part_runs_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, parts = tmp_path / "check.json", [part for part in gpu_check.QUICK_PARTS if "transformers" not in part]
    arguments = ["--device", "cpu", "--quick", "--output", str(file), "--parts", ",".join(parts)]
    assert gpu_check.main(arguments) == gpu_check.HELD
    report = json.loads(file.read_text())
    assert list(report) == ["device", *parts]
    checks = report["correctness"]["findings"]
    assert len({check["name"] for check in checks}) == len(checks) >= 10
    assert all(0 <= check["error"] <= check["allowed"] and check["held"] for check in checks)
    said = capsys.readouterr().out
    assert said.count("held ") == len(checks)
    for part in parts[2:]:
        rows = [finding for finding in report[part]["findings"] if "streams" in finding]
        assert [row["streams"] for row in rows] == [1, 4]
        assert said.count(f"{part} ") >= 4, "two numbers of streams, prefill, memory"


def test_kernels_without_block_tables_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "TWIN", replace(TWIN, reads_pages=False))
    check = next(correctness.check_all(CPU))
    assert check.name == "kernel and twin"
    assert check.held
    assert "copies" in check.note


@pytest.mark.usefixtures("quick")
def test_what_is_wrong_does_not_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(correctness, "choose", None)  # one check cannot even run
    monkeypatch.setattr(correctness, "varlen_twin", lambda **arguments: torch.ones_like(arguments["query"]))
    arguments = ["--device", "cpu", "--quick", "--output", str(tmp_path / "check.json"), "--parts", "correctness"]
    assert gpu_check.main(arguments) == gpu_check.FAILED
    checks = json.loads((tmp_path / "check.json").read_text())["correctness"]["findings"]
    failed = {check["name"]: check for check in checks if not check["held"]}
    assert failed["sampler's tokens"]["error"] is None
    assert "TypeError" in failed["sampler's tokens"]["note"]
    assert failed["kernel and twin"]["error"] > 0.02
    assert len(failed) == 2


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "run", in_process)
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu_check.main(["--output", str(tmp_path / "check.json")]) == gpu_check.NO_GPU
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_what_a_part_found_survives_its_end() -> None:
    code = "print('{\"found\": 1}', flush=True); "
    stuck = gpu_check.run([sys.executable, "-c", f"{code}import time; time.sleep(600)"], 2)
    assert stuck["findings"] == [{"found": 1}]
    assert stuck["error"] == "not done after 2 seconds"
    fallen = gpu_check.run([sys.executable, "-c", f"{code}raise SystemExit('CUDA error: illegal address')"], 20)
    assert fallen["findings"] == [{"found": 1}]
    assert fallen["error"] == "CUDA error: illegal address"


def test_nothing_checked_is_not_held() -> None:
    good: dict[str, Any] = {"findings": [{"held": True}], "error": None}
    assert gpu_check.held({"correctness": good})
    changes: dict[str, Any]
    for changes in ({"findings": []}, {"error": "not done"}, {"findings": [{"held": True}, {"held": False}]}):
        assert not gpu_check.held({"correctness": good | changes})
    assert not gpu_check.held({})


def test_shapes_have_the_size_that_they_are_named_after() -> None:
    sizes = {name: round(weight_count(config) / 1e6) for name, config in SHAPES.items() if name != "tiny"}
    assert sizes == {"135M": 134, "1.1B": 1100, "8B": 8030}
    tiny = random_decoder(SHAPES["tiny"], CPU, torch.bfloat16)
    matrices = sum(parameter.numel() for parameter in tiny.parameters() if parameter.dim() == 2)
    assert matrices == weight_count(SHAPES["tiny"])
    assert {parameter.dtype for parameter in tiny.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
