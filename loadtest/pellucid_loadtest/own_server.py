"""A server of one's own on a free port of this machine, for as long as a test or a benchmark runs."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

STOP_SECONDS = 40.0


class StartError(Exception):
    """The server did not start; the text is what it said last."""


@dataclass(frozen=True)
class OwnServer:
    address: str
    pid: int
    metrics: str
    """Where its metrics are; "off": nowhere."""
    start_seconds: float
    """From the command to the first request that would be taken."""


def leave_in_order_on_sigterm() -> None:
    """For programs: SIGTERM too leaves through the `with` blocks, so that no server stays behind."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@contextlib.contextmanager
def own_server(arguments: Sequence[str], *, metrics: bool = False) -> Iterator[OwnServer]:
    """`pellucid serve` with these arguments, once it is ready; it is stopped with the block. Raises StartError."""
    command = [sys.executable, "-m", "pellucid_client.cli", "serve", *arguments, "--log-format", "json"]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0" if metrics else "off"]
    began = time.monotonic()
    # A session of its own: Ctrl-C is for the load, which then ends the run and reports.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True, encoding="utf-8"
    )
    with process:
        try:
            if process.stderr is None:
                raise StartError("its log was not piped")
            events = _events(process.stderr)
            serving = _serving(events)
            seconds = time.monotonic() - began
            threading.Thread(target=_show_problems, args=(events,), daemon=True).start()
            yield OwnServer(str(serving["grpc"]), process.pid, str(serving["metrics"]), seconds)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _events(log: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The server's log; a line that is not one of its events becomes one."""
    for line in log:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        yield event if isinstance(event, dict) else {"level": "error", "message": line.strip()}


def _serving(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The event that says it is ready."""
    last = "it said nothing"
    for event in events:
        if event["message"] == "serving":
            return event
        last = str(event["message"]) or last
    raise StartError(last)


def _show_problems(events: Iterator[dict[str, Any]]) -> None:
    for event in events:
        if event.get("level") in ("warning", "error", "critical"):
            print(f"server: {event['message']}", file=sys.stderr)
