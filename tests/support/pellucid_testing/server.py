"""A real `pellucid serve` process on free ports, for tests of whatever talks to one.

with serve(folder, "--max-running", "2") as server:
    stub = inference_pb2_grpc.InferenceServiceStub(server.channel())
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

ROOT = Path(__file__).parents[3]
SOURCES = [str(ROOT / part) for part in ("proto", "model", "server", "clients/python", "tests/support")]
SERVE = "import sys; from pellucid_server.cli import serve_command; sys.exit(serve_command(sys.argv[1:]))"
START_SECONDS = 60.0


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

    def wait_for_metric(self, name: str, value: float, *, timeout: float = 10.0, **labels: str) -> None:
        """Waits until the metric has this value; it is scraped, so there is nothing to await."""
        end = time.monotonic() + timeout
        while (found := self.metric(name, **labels)) != value:
            if time.monotonic() > end:
                raise AssertionError(f"{name} {labels} is {found}, not {value}; the server said:\n{self.log()}")
            time.sleep(0.02)

    def engine_pid(self) -> int:
        """The engine's process id: the server's only child process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = map(int, children)
        return pid

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 30.0) -> int:
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
