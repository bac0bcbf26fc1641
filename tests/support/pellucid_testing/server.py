"""A real `pellucid serve` process on free ports, for tests of whatever talks to one.

with serve(folder, "--max-running", "2") as server:
    stub = inference_pb2_grpc.InferenceServiceStub(server.channel())

A tiny model's steps take a fraction of a millisecond, so what is to meet in one of them, or to happen before a stream
ends, may come too late on a busy machine. With the engine stopped there is time for everything:

    with server.engine_stopped():
        calls = [stub.Generate(request(text), timeout=60) for text in texts]
        server.wait_for_queue(len(calls))
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import grpc

from pellucid.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).parents[3]
SOURCES = [str(ROOT / part) for part in ("proto", "model", "server", "clients/python", "tests/support")]
SERVE = "import sys; from pellucid_server.cli import serve_command; sys.exit(serve_command(sys.argv[1:]))"
START_SECONDS = 100.0


class ServerProcess:
    """One server. Its events (JSON log lines) are read as they come; `event` waits for one."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self.other_lines: list[str] = []
        self._condition = threading.Condition()
        self._ended = False
        self._channels: list[grpc.Channel] = []
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def event(self, message: str, *, count: int = 1, timeout: float = START_SECONDS) -> dict[str, Any]:
        """The `count`th event with this message. Raises AssertionError with the log where it does not come."""

        def found() -> list[dict[str, Any]]:
            return [event for event in self.events if event.get("message") == message]

        with self._condition:
            self._condition.wait_for(lambda: len(found()) >= count or self._ended, timeout)
            events = found()
        if len(events) < count:
            raise AssertionError(f"the server never said {message!r}; it said:\n{self.log()}")
        return events[count - 1]

    def log(self) -> str:
        """All that the server has written."""
        return "\n".join([*(json.dumps(event, ensure_ascii=False) for event in self.events), *self.other_lines])

    @property
    def address(self) -> str:
        return str(self.event("listening")["grpc"])

    @property
    def metrics_address(self) -> str:
        return str(self.event("listening")["metrics"])

    def channel(self, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """A new channel, closed with the server."""
        # Without a pool of its own, channels with equal options share one connection.
        channel = grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1), *options])
        self._channels.append(channel)
        return channel

    def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels, as in `pellucid_requests_running{model_name="tiny"}`."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name whose labels include these."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.split("{")[0] == name and all(label in sample for label in wanted)
        )

    def wait_for_metric(self, name: str, value: float, *, timeout: float = START_SECONDS, **labels: str) -> None:
        """Waits until the metric has this value; it is scraped, so there is nothing to await."""
        end = time.monotonic() + timeout
        while (found := self.metric(name, **labels)) != value:
            if time.monotonic() > end:
                raise AssertionError(f"{name} {labels} is {found}, not {value}; the server said:\n{self.log()}")
            time.sleep(0.02)

    def engine_pid(self) -> int:
        """The engine's process id: the server's only child process, but for the one that checks constraints."""
        (pid,) = self._children()
        return pid

    @contextlib.contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """The engine stands still while the block runs, which must take less than --engine-timeout-seconds."""
        pid = self.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was taken for one that hangs
                os.kill(pid, signal.SIGCONT)

    def wait_for_queue(self, count: int) -> None:
        """Waits until so many sequences wait for a stopped engine, and all of them meet its next step.

        A request that waits may still be tokenized. One without any token is refused behind those, most likely.
        """
        self.wait_for_metric("pellucid_requests_waiting", count)
        empty = inference_pb2.GenerateRequest(token_ids={"ids": []})
        with contextlib.suppress(grpc.RpcError):
            list(inference_pb2_grpc.InferenceServiceStub(self.channel()).Generate(empty, timeout=START_SECONDS))

    def engine_that_stopped(self) -> int:
        """Waits for an engine that stops itself, as a script may tell it to; returns its process id."""
        end = time.monotonic() + START_SECONDS
        while True:
            for pid in self._children():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
                        return pid
            if time.monotonic() > end:
                raise AssertionError(f"the engine has not stopped itself; the server said:\n{self.log()}")
            time.sleep(0.01)

    def load_until_refused(self, count: int) -> None:
        """Lets an engine that stopped itself before it was ready go on, once so many calls have been refused."""
        engine = self.engine_that_stopped()

        def go_on() -> None:
            self.wait_for_metric("pellucid_request_rejections_total", count, reason="model_loading")
            os.kill(engine, signal.SIGCONT)

        threading.Thread(target=go_on, daemon=True).start()

    def restart_engine(self) -> None:
        """Kills the engine and waits until the next one is up."""
        restarts = self.metric("pellucid_engine_restarts_total")
        os.kill(self.engine_pid(), signal.SIGKILL)
        self.wait_for_metric("pellucid_engine_restarts_total", restarts + 1)
        self.wait_for_metric("pellucid_engine_up", 1)

    def _children(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split() if b"constraint_check" not in _command_line(pid)]

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 60.0) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def close(self) -> None:
        """Ends the server, whatever its state."""
        for channel in self._channels:
            channel.close()
        if self.process.poll() is None:
            for pid in self._children():  # a stopped engine would not see the server's end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def _read(self, log: IO[str]) -> None:
        with log:
            for line in log:
                with self._condition:
                    try:
                        self.events.append(json.loads(line))
                    except ValueError:
                        self.other_lines.append(line.rstrip("\n"))
                    self._condition.notify_all()
        with self._condition:
            self._ended = True
            self._condition.notify_all()


def _command_line(pid: str) -> bytes:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def start_server(
    checkpoint: Path | None,
    *arguments: str,
    program: Sequence[str] = ("-c", SERVE),
    environment: Mapping[str, str] | None = None,
) -> ServerProcess:
    """Starts a server and does not wait. `program` replaces what python runs; `environment` is added to this one's."""
    command = [sys.executable, *program, *([str(checkpoint)] if checkpoint is not None else [])]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--log-format", "json", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=tempfile.gettempdir(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), **(environment or {})},
    )
    if process.stderr is None:
        raise RuntimeError("the server's standard error was not piped")
    return ServerProcess(process, process.stderr)


@contextlib.contextmanager
def serve(
    checkpoint: Path | None,
    *arguments: str,
    program: Sequence[str] = ("-c", SERVE),
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """A server that is SERVING; ended with the block. The arguments are those of `pellucid serve`."""
    server = start_server(checkpoint, *arguments, program=program, environment=environment)
    try:
        server.event("serving")
        yield server
    finally:
        server.close()
