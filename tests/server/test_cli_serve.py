"""`pellucid serve` as an operator meets it: exit codes, single lines, signals and draining."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pellucid.v1 import inference_pb2_grpc
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_testing.calls import collect, failure, request
from pellucid_testing.checkpoints import tiny_checkpoint
from pellucid_testing.scripted_engine import Script
from pellucid_testing.server import SOURCES, ServerProcess, serve, start_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "config.json").write_text(json.dumps({}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 10**6]}))
    CharacterTokenizer.train(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"]).save(folder)
    return folder


def script(tmp_path: Path, step_seconds: float = 0.02, start_seconds: float = 0.0) -> list[str]:
    return Script(lives=str(tmp_path / "lives"), step_seconds=step_seconds, start_seconds=start_seconds).program()


def last_words(checkpoint: Path | None, *arguments: str) -> tuple[int, list[str]]:
    server = start_server(checkpoint, *arguments)
    code = server.process.wait(100)
    server.close()
    return code, server.other_lines


def stub(server: ServerProcess) -> inference_pb2_grpc.InferenceServiceStub:
    return inference_pb2_grpc.InferenceServiceStub(server.channel())


def test_bad_settings_exit_with_2_and_one_line(folder: Path) -> None:
    code, lines = last_words(folder, "--max-running", "none")
    assert code == 2
    assert lines == [
        "pellucid serve: command line --max-running: max-running = 'none' is not accepted; "
        "accepted: a whole number from 1 to 4096"
    ]


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    code, lines = last_words(tmp_path / "missing")
    assert code == 1
    assert lines == [
        f"pellucid serve: checkpoint {tmp_path / 'missing'} does not exist; "
        "name a folder with config.json and model.safetensors, "
        "or a file: .gguf, .pt, .pth, .bin, .ckpt, .safetensors"
    ]


def test_a_broken_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{")
    code, (line,) = last_words(tmp_path)
    assert code == 1
    assert "tokenizer.json" in line


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_a_port_in_use(folder: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, lines = last_words(folder, flag, address)
    assert code == 1
    assert lines == [
        f"pellucid serve: cannot listen on {address}: Address already in use; "
        f"stop what uses it or choose another {flag}"
    ]


def test_a_host_that_is_not_ours(folder: Path) -> None:
    code, (line,) = last_words(folder, "--listen", "192.0.2.1:0")
    assert code == 1
    assert "cannot listen on 192.0.2.1:0" in line


def test_the_frontend_never_imports_torch() -> None:
    program = "import sys, pellucid_server.cli; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    environment = {"PYTHONPATH": ":".join(SOURCES)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "[]\n"


def test_the_summary(folder: Path, tmp_path: Path) -> None:
    with serve(folder, "--listen", "0.0.0.0:0", program=script(tmp_path)) as server:
        summary = server.event("serving")
        assert summary["model"] == folder.name
        assert summary["kv_cache"] == "256 tokens in 64 blocks, 0B"
        assert {"architecture", "parameters", "dtype", "device", "kernels", "grpc", "metrics"} <= set(summary)
        assert summary["security"] == "none"
        server.event("the model has 49 token ids; end tokens beyond them never come: [1000000]")
        server.event(
            "--listen 0.0.0.0:0 is open to other machines, without TLS and without tokens: anybody who reaches it can "
            "use it, and listen on the way; see docs/security.md"
        )


def test_text_logs_show_the_summary_in_lines(folder: Path, tmp_path: Path) -> None:
    server = start_server(folder, "--log-format", "text", program=script(tmp_path))
    deadline = time.monotonic() + 20
    while not any(line.strip().startswith("metrics") for line in server.other_lines):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.close()
    assert any("INFO serving" in line for line in server.other_lines)
    assert "  device        cpu" in server.other_lines


def test_running_streams_finish_before_the_end(folder: Path, tmp_path: Path) -> None:
    with serve(folder, program=script(tmp_path)) as server:
        service = stub(server)
        calls = [service.Generate(request(stopping={"max_new_tokens": 10}), timeout=60) for _ in range(4)]
        firsts = [next(call) for call in calls]
        with server.engine_stopped():
            server.process.send_signal(signal.SIGTERM)
            server.event("shutting down")
            late = failure(stub(server).Generate(request(), timeout=20))
        assert (late.code, late.reason) == ("UNAVAILABLE", "DRAINING")
        assert late.retry_after is not None
        for first, call in zip(firsts, calls, strict=True):
            answer = collect([first, *call])
            assert (len(answer.token_ids), answer.reason) == (10, "max_new_tokens")
        assert server.process.wait(100) == 0


def test_the_drain_time_ends_what_is_left(folder: Path, tmp_path: Path) -> None:
    """Which is long before the stream's own end."""
    with serve(folder, "--drain-seconds", "0.3", program=script(tmp_path, 0.1)) as server:
        call = stub(server).Generate(request(stopping={"max_new_tokens": 100}), timeout=60)
        next(call)
        server.process.send_signal(signal.SIGTERM)
        found = failure(call)
        assert (found.code, found.reason) == ("UNAVAILABLE", "DRAINING")
        assert server.process.wait(100) == 0


# An engine that does not end with the server is killed after 5 s, and a drain that waits for nobody takes 30 s.
IN_A_MOMENT = 4.0


def test_an_idle_server_ends_soon(folder: Path, tmp_path: Path) -> None:
    with serve(folder, program=script(tmp_path)) as server:
        began = time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - began < IN_A_MOMENT


def test_an_idle_server_with_a_model_ends_in_a_moment(tmp_path: Path) -> None:
    with serve(tiny_checkpoint(tmp_path / "tiny")) as server:
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < IN_A_MOMENT


def test_a_signal_while_loading_ends_the_start(folder: Path, tmp_path: Path) -> None:
    server = start_server(folder, program=script(tmp_path, start_seconds=60))
    server.event("listening")
    loading = failure(stub(server).Generate(request(), timeout=20))
    assert (loading.code, loading.reason) == ("UNAVAILABLE", "MODEL_LOADING")
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 20
    server.close()


def test_a_second_signal_ends_at_once(folder: Path, tmp_path: Path) -> None:
    with serve(folder, program=script(tmp_path, 0.1)) as server:
        call = stub(server).Generate(request(stopping={"max_new_tokens": 100}), timeout=60)
        next(call)
        # Two in a moment are one.
        for number in (signal.SIGTERM, signal.SIGINT):
            server.process.send_signal(number)
        server.event("shutting down")
        time.sleep(0.3)
        next(call)
        # The stream would last ten seconds.
        began = time.monotonic()
        assert server.stop() == 128 + signal.SIGTERM
        assert time.monotonic() - began < IN_A_MOMENT
