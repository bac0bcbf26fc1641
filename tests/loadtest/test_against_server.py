"""Whole runs of a few seconds against a real server: `locust -f loadtest/locustfile.py` as users start it."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from pellucid.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)
from pellucid_testing.certificates import Authority
from pellucid_testing.checkpoints import tiny_checkpoint
from pellucid_testing.server import ServerProcess, serve

ROOT = Path(__file__).parents[2]
LOCUSTFILE = ROOT / "loadtest/locustfile.py"
QUICK = ("--prompt-length", "uniform:4:12", "--output-length", "uniform:4:12", "--warm-up", "0.4", "--drain", "20")


@dataclass(frozen=True)
class Outcome:
    """What is left of a run."""

    code: int
    seconds: float
    output: str
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        (path,) = self.folder.glob("*/report.json")
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    @property
    def records(self) -> list[dict[str, Any]]:
        (path,) = self.folder.glob("*/requests.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


def start(folder: Path, address: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", address),
            *("--output-folder", str(folder), *QUICK, *arguments),
        ],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path, begun: float) -> Outcome:
    try:
        output, _ = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return Outcome(process.returncode, time.monotonic() - begun, output, folder)


def run(folder: Path, address: str, *arguments: str) -> Outcome:
    begun = time.monotonic()
    return finish(start(folder, address, "--headless", "--only-summary", *arguments), folder, begun)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with serve(checkpoint) as process:
        yield process


def test_closed_loop(server: ServerProcess, tmp_path: Path) -> None:
    before = server.metric("pellucid_generated_tokens_total")
    outcome = run(tmp_path, server.address, "-t", "2s", "-u", "3", "-r", "10", "--slo-ttft", "60000")
    report, records = outcome.report, outcome.records
    assert outcome.code == 0, outcome.output
    assert report["requests"]["ok"] == report["requests"]["measured"] >= 3
    assert report["concurrency"]["peak"] == 3
    assert [record["index"] for record in records] == list(range(len(records))), "each request once, in order"
    tokens = sum(sum(record["token_counts"]) for record in records)
    assert server.metric("pellucid_generated_tokens_total") - before == tokens, "the server counts the same tokens"
    assert all(4 <= sum(record["token_counts"]) <= 12 for record in records), "ignore_eos: full lengths"
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = report["latency_ms"][name]
        assert 0 < values["min"] <= values["median"] <= values["p90"] <= values["p99"] <= values["max"]
    assert report["latency_ms"]["ttft"]["median"] < report["latency_ms"]["e2e"]["median"]
    assert report["slo"]["attainment"] == 1.0
    assert "PASSED" in outcome.output
    assert "Generate/ttft" in outcome.output, "Locust's own table has the rows, too"
    assert (next(tmp_path.glob("*/report.html"))).read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_server_that_wants_a_certificate_and_a_token(checkpoint: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, client, tokens = authority.issue("server"), authority.issue("client"), tmp_path / "tokens"
    tokens.write_text("some.token-1==\n")
    flags = ["--tls-certificate", own.certificate, "--tls-key", own.key, "--tls-client-ca", authority.certificate]
    with serve(checkpoint, *map(str, flags), "--auth-token-file", str(tokens)) as server:
        keys = ["--ca-certificate", authority.certificate, "--certificate", client.certificate, "--key", client.key]
        run_for = ("-t", "1s", "-u", "1", "--warm-up", "0")
        outcome = run(tmp_path, server.address, *run_for, *map(str, keys), "--token-file", str(tokens))
    assert outcome.code == 0, outcome.output
    assert outcome.report["requests"]["ok"] > 0


def test_open_loop_by_two_processes(server: ServerProcess, tmp_path: Path) -> None:
    arguments = ("-t", "2s", "--arrivals", "poisson", "--rate", "12", "--concurrency", "8", "--seed", "3")
    outcome = run(tmp_path, server.address, *arguments, "--processes", "2")
    report, records = outcome.report, outcome.records
    assert outcome.code == 0, outcome.output
    assert report["users"] == 8
    assert report["requests"]["unsent"] == report["requests"]["unfinished"] == 0, "what has arrived is drained"
    indices = [record["index"] for record in records]
    assert len(set(indices)) == len(indices)
    assert {index % 2 for index in indices} == {0, 1}, "each process sends its share"
    assert 2 <= report["throughput"]["offered_requests_per_s"] <= 40
    assert all(record["sent"] >= record["arrival"] for record in records)


def test_without_a_server_the_run_is_over_at_once(tmp_path: Path) -> None:
    outcome = run(tmp_path, "127.0.0.1:1", "-t", "60s")
    assert outcome.code == 2
    assert "no Pellucid server to test: no connection to the server at 127.0.0.1:1" in outcome.output
    assert outcome.seconds < 45
    assert not list(tmp_path.iterdir()), "there is nothing to report"


def test_a_server_that_hangs_or_dies_does_not_hold_the_run_up(checkpoint: Path, tmp_path: Path) -> None:
    """Stopped: requests that never end, in the report as such. Killed: failures by their code."""
    with serve(checkpoint) as one, serve(checkpoint) as other, ThreadPoolExecutor(1) as beside:
        hanging = beside.submit(interrupted, one, tmp_path / "hung", signal.SIGSTOP)
        dead = interrupted(other, tmp_path / "dead", signal.SIGKILL)
        hung = hanging.result()
    assert hung.report["requests"]["ok"] > 0, hung.output
    assert hung.report["requests"]["unfinished"] == 4
    assert hung.code == 1, "what never ends keeps no SLO"
    assert dead.report["requests"]["ok"] > 0, dead.output
    assert dead.report["requests"]["failed"] >= 4
    assert {each["code"] for each in dead.report["failures"]} == {"UNAVAILABLE"}
    assert dead.code == 1
    assert "UNAVAILABLE" in dead.output
    for outcome in (hung, dead):
        assert outcome.seconds < 60, outcome.output


def interrupted(server: ServerProcess, folder: Path, number: signal.Signals) -> Outcome:
    """A run of 3 s whose server gets a signal after its first answers."""
    folder.mkdir()
    begun = time.monotonic()
    answered = server.metric("pellucid_requests_finished_total")
    arguments = ("--headless", "--only-summary", "-t", "3s", "-u", "4", "-r", "10")
    process = start(folder, server.address, *arguments, "--warm-up", "0", "--drain", "0.5", "--slo-e2e", "60000")
    while server.metric("pellucid_requests_finished_total") < answered + 8:
        assert process.poll() is None
        time.sleep(0.02)
    server.process.send_signal(number)
    return finish(process, folder, begun)


STREAM_SECONDS = 0.5


class Slow(
    inference_pb2_grpc.InferenceServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
    server_pb2_grpc.ServerServiceServicer,
):
    """Answers that take STREAM_SECONDS, however many are asked for."""

    def __init__(self) -> None:
        self.peers: set[str] = set()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.peers.add(context.peer())
        for _ in range(5):
            time.sleep(STREAM_SECONDS / 5)
            message = inference_pb2.GenerateResponse()
            message.outputs.add(token_ids=[1])
            yield message

    def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        model = model_pb2.Model(name="slow", vocab_size=9, max_context_tokens=99, max_output_tokens=99)
        return model_pb2.ListModelsResponse(models=[model])

    def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> server_pb2.GetServerInfoResponse:
        return server_pb2.GetServerInfoResponse(version="0")


def test_users_run_side_by_side_and_the_run_ends_in_time(tmp_path: Path) -> None:
    slow = Slow()
    server = grpc.server(ThreadPoolExecutor(40), options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(slow, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(slow, server)
    server_pb2_grpc.add_ServerServiceServicer_to_server(slow, server)
    server.start()
    try:
        outcome = run(tmp_path, f"127.0.0.1:{port}", "-t", "2s", "-u", "20", "-r", "20")
    finally:
        server.stop(None)
    report = outcome.report
    assert outcome.code == 0, outcome.output
    assert report["concurrency"]["peak"] == 20
    assert len(slow.peers) == 20, "one connection a user"
    ideal = 20 / STREAM_SECONDS
    assert ideal * 0.2 <= report["throughput"]["requests_per_s"] <= ideal * 1.1
    assert report["latency_ms"]["e2e"]["median"] >= STREAM_SECONDS * 1e3
    assert report["latency_ms"]["ttft"]["median"] < 0.6 * report["latency_ms"]["e2e"]["median"]
    assert 1.5 < report["window"]["end_s"] < 10, "-t is kept, however long the imports took"


def test_the_web_page_runs_a_test_and_shows_its_report(server: ServerProcess, tmp_path: Path) -> None:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    process = start(tmp_path, server.address, "--web-host", "127.0.0.1", "--web-port", str(port))
    try:
        fetch(f"{base}/", retry_seconds=60)
        form = {"user_count": "2", "spawn_rate": "2", "host": server.address, "warm_up": "0.2", "slo_e2e": "60000"}
        fetch(f"{base}/swarm", form)
        wait_for_row(f"{base}/stats/requests", "Generate")
        fetch(f"{base}/stop", {})
        page = fetch(f"{base}/report")
        assert "Load test of" in page
        assert "<svg" in page
        process.terminate()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "PASSED" in output


def free_port() -> int:
    """A port that was free a moment ago; Locust cannot choose one itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def fetch(url: str, form: dict[str, str] | None = None, retry_seconds: float = 0.0) -> str:
    end = time.monotonic() + retry_seconds
    data = None if form is None else urllib.parse.urlencode(form).encode()
    while True:
        try:
            with urllib.request.urlopen(url, data, timeout=20) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def wait_for_row(url: str, name: str) -> None:
    """Until Locust's table has requests under this name; it is polled, as its page does."""
    end = time.monotonic() + 60
    while not any(row["name"] == name for row in json.loads(fetch(url))["stats"]):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_make_load(checkpoint: Path, tmp_path: Path) -> None:
    """What `make load` runs: a server of its own, stopped afterwards; the exit code is the load test's."""
    script = [sys.executable, str(ROOT / "loadtest/run.py"), str(checkpoint), "-t", "2s", *QUICK]
    options = ["--output-folder", str(tmp_path / "reports"), "--slo-ttft", "0.001"]
    done = subprocess.run([*script, *options], capture_output=True, text=True, timeout=110)
    assert done.returncode == 1, done.stderr
    assert "MISSED" in done.stdout
    assert "time to first token" in done.stdout
    (report,) = (tmp_path / "reports").glob("*/report.json")
    address = json.loads(report.read_text())["address"]
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
        server_pb2_grpc.ServerServiceStub(channel).GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=5)


def test_make_load_helps_without_a_server(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "loadtest/run.py"), str(tmp_path / "nothing"), "--help"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("usage: run.py", "--slo-ttft MS", "Usage: locust", "--run-time"):
        assert text in done.stdout


def test_make_load_says_why_the_server_did_not_start(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "loadtest/run.py"), str(tmp_path / "nothing")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=110)
    assert done.returncode == 2
    assert done.stderr.startswith("load: the server did not start: ")
    assert "nothing" in done.stderr
