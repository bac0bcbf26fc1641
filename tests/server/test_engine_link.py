"""The engine process and its deaths, with a scripted engine that speaks the real protocol."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pellucid.v1 import inference_pb2, inference_pb2_grpc
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_server.engine.messages import Configure, Ready, StepDone
from pellucid_server.engine_link import EngineLink
from pellucid_server.errors import StartError
from pellucid_testing import scripted_engine
from pellucid_testing.calls import collect, failure, generate, request
from pellucid_testing.scripted_engine import FIRST_TOKEN, PERIOD, Script
from pellucid_testing.server import ServerProcess, serve, start_server

CONFIGURE = Configure(
    checkpoint="",
    device="cpu",
    dtype="auto",
    kv_cache_memory=0,
    kv_block_size=0,
    max_context=0,
    max_running=1,
    max_step_tokens=1,
    threads=1,
    tokenizer_size=0,
    log_level="info",
    log_format="json",
)
TIMEOUT_SECONDS = 2.0
"""Until an engine counts as hung: more than a busy machine may make it wait."""
TIMEOUT = ("--engine-timeout-seconds", str(TIMEOUT_SECONDS))
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer has as many tokens as the scripted engine says; there are no weights."""
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "config.json").write_text(json.dumps({}))
    CharacterTokenizer.train([LETTERS]).save(folder)
    return folder


@contextmanager
def scripted(folder: Path, tmp_path: Path, *arguments: str, **script: Any) -> Iterator[ServerProcess]:
    with serve(folder, *arguments, program=Script(lives=str(tmp_path / "lives"), **script).program()) as server:
        yield server


def stub(server: ServerProcess) -> inference_pb2_grpc.InferenceServiceStub:
    return inference_pb2_grpc.InferenceServiceStub(server.channel())


def expected(count: int) -> list[int]:
    return [FIRST_TOKEN + i % PERIOD for i in range(count)]


def health_status(server: ServerProcess, name: str = "") -> int:
    health: Any = health_pb2_grpc.HealthStub(server.channel())
    return int(health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status)


def test_streams_survive_the_engine(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, die_after_steps=[10, 7]) as server:
        with server.engine_stopped():
            calls = [stub(server).Generate(request(stopping={"max_new_tokens": 20 + i}), timeout=60) for i in range(4)]
            server.wait_for_queue(4)
        for index, call in enumerate(calls):
            answer = collect(call)
            assert answer.token_ids == expected(20 + index)
            assert answer.timings.engine_recovery_count == 2
        assert server.metric("pellucid_engine_restarts_total", reason="signal") == 2
        assert server.metric("pellucid_streams_recovered_total") >= 4
        assert server.metric("pellucid_generated_tokens_total") == sum(20 + i for i in range(4))
        assert server.metric("pellucid_requests_finished_total", reason="max_new_tokens") == 4


def test_a_stop_string_across_the_death_is_still_seen(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, step_seconds=0.005, die_after_steps=[5]) as server:
        text = CharacterTokenizer.train([LETTERS]).decode(expected(12))
        answer = generate(server.channel(), stopping={"max_new_tokens": 30, "stop_strings": [text[3:8]]})
        assert (answer.text, answer.reason) == (text[:3], "stop_string")
        assert answer.timings.engine_recovery_count == 1


def test_a_request_that_engines_keep_dying_on_is_given_up(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, die_after_steps=[0] * 3) as server:
        found = failure(stub(server).Generate(request(), timeout=20))
        assert (found.code, found.reason) == ("UNAVAILABLE", "ENGINE_DOWN")
        assert found.retry_after == 1.0
        assert found.trailers["grpc-retry-pushback-ms"] == "1000"
        assert found.headers == {}
        server.wait_for_metric("pellucid_engine_up", 1)
        assert generate(server.channel(), stopping={"max_new_tokens": 3}).token_ids == expected(3)
        assert server.metric("pellucid_requests_finished_total", reason="engine_down") == 1


def test_while_the_engine_is_away(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, hang_after_steps=[-1, 0]) as server:
        assert health_status(server) == health_pb2.HealthCheckResponse.SERVING
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.event("the engine is down and will be restarted")
        engine = server.engine_that_stopped()
        found = failure(stub(server).Generate(request(), timeout=20))
        assert (found.code, found.reason, found.retry_after) == ("UNAVAILABLE", "ENGINE_DOWN", 1.0)
        for name in ("", "pellucid.v1.InferenceService", "pellucid.v1.ServerService"):
            assert health_status(server, name) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health_status(server, "liveness") == health_pb2.HealthCheckResponse.SERVING
        assert server.metric("pellucid_server_ready") == server.metric("pellucid_engine_up") == 0
        os.kill(engine, signal.SIGCONT)
        server.wait_for_metric("pellucid_server_ready", 1)
        assert health_status(server) == health_pb2.HealthCheckResponse.SERVING
        assert generate(server.channel(), stopping={"max_new_tokens": 3}).reason == "max_new_tokens"


def test_cancel_and_deadline_while_the_engine_is_away(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, die_after_steps=[3], hang_after_steps=[-1, 0]) as server:
        service, ninety_nine = stub(server), {"max_new_tokens": 99}
        with server.engine_stopped():
            cancelled = service.Generate(request(request_id="a", stopping=ninety_nine), timeout=60)
            limited = service.Generate(request(stopping={**ninety_nine, "time_limit": {"seconds": 2}}), timeout=60)
            late = service.Generate(request(stopping=ninety_nine), timeout=2.5)
            server.wait_for_queue(3)
        engine = server.engine_that_stopped()
        result = service.Cancel(inference_pb2.CancelRequest(request_id="a")).result
        assert result == inference_pb2.CANCEL_RESULT_CANCELLED
        assert collect(cancelled).reason == "cancelled"
        assert collect(limited).reason == "time_limit"
        assert failure(late).code == "DEADLINE_EXCEEDED"
        server.wait_for_metric("pellucid_requests_waiting", 0)
        os.kill(engine, signal.SIGCONT)


def test_logits_that_are_not_finite(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, non_finite=True) as server:
        found = failure(stub(server).Generate(request(request_id="poor"), timeout=20))
        assert (found.code, found.reason) == ("INTERNAL", "NON_FINITE_LOGITS")
        assert "'poor'" in found.message
        assert server.metric("pellucid_non_finite_logits_total") == 1


def test_an_engine_that_refuses_to_start_ends_the_server_with_its_reason(folder: Path, tmp_path: Path) -> None:
    script = Script(lives=str(tmp_path / "lives"), start_failed="weights.7 is missing; convert the checkpoint again")
    server = start_server(folder, program=script.program())
    assert server.process.wait(100) == 1
    server.close()
    assert server.other_lines == ["weights.7 is missing; convert the checkpoint again"]


def test_an_engine_that_dies_while_loading_ends_the_server(folder: Path, tmp_path: Path) -> None:
    server = start_server(folder, program=Script(lives=str(tmp_path / "lives"), exit_at_start=True).program())
    assert server.process.wait(100) == 1
    server.close()
    assert server.other_lines == [
        "the engine process ended while it was loading the model (exit 3); its log above may say why"
    ]


def test_a_failed_restart_is_tried_again(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, hang_after_steps=[-1, 0]) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        os.kill(server.engine_that_stopped(), signal.SIGKILL)
        server.event("the engine is down and will be restarted", count=2)
        server.wait_for_metric("pellucid_engine_up", 1)
        assert server.metric("pellucid_engine_restarts_total") == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphans(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    with scripted(folder, tmp_path) as server:
        engine = server.engine_pid()
        server.stop(number)
        end = time.monotonic() + 30
        while _is_alive(engine):
            assert time.monotonic() < end
            time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_that_hangs_is_replaced_and_streams_go_on(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, *TIMEOUT, hang_after_steps=[10]) as server:
        with server.engine_stopped():
            calls = [stub(server).Generate(request(stopping={"max_new_tokens": 20 + i}), timeout=60) for i in range(3)]
            server.wait_for_metric("pellucid_requests_waiting", 3)
        for index, call in enumerate(calls):
            answer = collect(call)
            assert answer.token_ids == expected(20 + index)
            assert answer.timings.engine_recovery_count == 1
        assert server.event("the engine is down and will be restarted")["cause"].startswith("hung for ")
        assert server.metric("pellucid_engine_restarts_total", reason="hung") == 1
        assert server.metric("pellucid_engine_restarts_total") == 1
        assert server.metric("pellucid_requests_finished_total", reason="max_new_tokens") == 3
        # An idle engine answers pings, so that silence means the same there.
        time.sleep(1.3 * TIMEOUT_SECONDS)
        assert server.metric("pellucid_engine_restarts_total") == 1
        os.kill(server.engine_pid(), signal.SIGSTOP)
        server.wait_for_metric("pellucid_engine_restarts_total", 2)
        server.wait_for_metric("pellucid_engine_up", 1)


async def test_an_engine_that_hangs_while_loading_has_a_limit_too(tmp_path: Path) -> None:
    script = Script(lives=str(tmp_path / "lives"), hang_after_steps=[-1, 0])
    link, events = script_link(script, start_timeout=60.0)
    running = asyncio.create_task(link.run(CONFIGURE))
    async with asyncio.timeout(60):
        await events.ups.get()
        # The second life hangs before it is ready. The third one has time to come up.
        events.start_timeouts = [0.5, 60.0]
        link.kill()
        await events.ups.get()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert events.restarts == ["signal", "hung"]


async def test_a_first_engine_that_hangs_while_loading_is_a_failed_start(tmp_path: Path) -> None:
    link, _ = script_link(Script(lives=str(tmp_path / "lives"), hang_after_steps=[0]), start_timeout=0.5)
    with pytest.raises(StartError, match="did not come up while it was loading the model \\(hung for"):
        await link.run(CONFIGURE)
    assert link.pid == 0


async def test_an_engine_that_talks_nonsense_is_as_good_as_dead() -> None:
    program = """
import socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
connection.recv(1)
connection.sendall(bytes([3, 0, 0, 0, 0xC1, 0xC1, 0xC1]))
time.sleep(60)
"""
    link = EngineLink(Events(), (sys.executable, "-c", program))
    with pytest.raises(StartError, match="ended while it was loading the model"):
        await link.run(CONFIGURE)
    assert link.pid == 0


async def test_an_error_in_the_server_is_no_fault_of_the_engine(tmp_path: Path) -> None:
    class Broken(Events):
        def engine_up(self, ready: Ready) -> None:
            raise RuntimeError("a fault of the server")

    link, events = script_link(Script(lives=str(tmp_path / "lives")), start_timeout=20.0, events=Broken())
    with pytest.raises(RuntimeError, match="a fault of the server"):
        await link.run(CONFIGURE)
    assert (link.pid, events.restarts) == (0, [])


class Events:
    """What an engine link says."""

    def __init__(self) -> None:
        self.ups: asyncio.Queue[Ready] = asyncio.Queue()
        self.restarts: list[str] = []
        self.start_timeouts: list[float] = []
        """Of the engines to come."""
        self.link: EngineLink | None = None

    def engine_up(self, ready: Ready) -> None:
        self.ups.put_nowait(ready)

    def engine_step(self, step: StepDone) -> None: ...

    def engine_down(self) -> None: ...

    def engine_restarting(self, reason: str) -> None:
        self.restarts.append(reason)
        if self.start_timeouts and self.link is not None:
            self.link._start_timeout = self.start_timeouts.pop(0)


def script_link(script: Script, start_timeout: float, events: Events | None = None) -> tuple[EngineLink, Events]:
    events = events or Events()
    command = (sys.executable, scripted_engine.__file__, json.dumps(asdict(script)))
    events.link = EngineLink(events, command, timeout=60.0, start_timeout=start_timeout)
    return events.link, events


def test_steps_as_slow_as_the_warm_up_promised_are_no_hang(folder: Path, tmp_path: Path) -> None:
    """The first step takes 1.5 s."""
    with scripted(folder, tmp_path, "--engine-timeout-seconds", "0.2", warm_up_seconds=0.3) as server:
        assert generate(server.channel(), stopping={"max_new_tokens": 3}).timings.engine_recovery_count == 0
        assert server.metric("pellucid_engine_restarts_total") == 0


def test_without_a_timeout_nothing_counts_as_a_hang(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, "--engine-timeout-seconds", "0") as server:
        with server.engine_stopped():
            call = stub(server).Generate(request(stopping={"max_new_tokens": 3}), timeout=60)
            time.sleep(0.6)
        assert collect(call).timings.engine_recovery_count == 0


def test_a_frontend_that_stood_still_blames_nobody(folder: Path, tmp_path: Path) -> None:
    with scripted(folder, tmp_path, *TIMEOUT) as server:
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * TIMEOUT_SECONDS)
        server.process.send_signal(signal.SIGCONT)
        assert generate(server.channel(), stopping={"max_new_tokens": 3}).token_ids == expected(3)
        assert server.metric("pellucid_engine_restarts_total") == 0
