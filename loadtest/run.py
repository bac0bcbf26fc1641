"""`make load`: a server of its own on free ports, a load test against it, and the load test's exit code.

usage: run.py [CHECKPOINT] [options of Locust and of docs/load-testing.md]

Without CHECKPOINT the bundled model is served; with --host no server is started. Options win over what is set here:
30 seconds, no web page, and 8 users in a closed loop. Order: the server starts, Locust runs, the server is stopped.
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
DEFAULTS = ("--headless", "--run-time", "30s", "--loglevel", "WARNING", "--only-summary")
CLOSED_LOOP_USERS = ("--users", "8", "--spawn-rate", "8")
START_FAILED = 2
STOP_SECONDS = 40.0


class StartError(Exception):
    """The server did not start; the text is what it said last."""


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _end)
    checkpoint = list(arguments[:1]) if arguments and not arguments[0].startswith("-") else []
    options = list(arguments[len(checkpoint) :])
    users = () if _given(options, "--arrivals") else CLOSED_LOOP_USERS
    try:
        with contextlib.ExitStack() as stack:
            if not _given(options, "-H", "--host"):
                address = stack.enter_context(_server(checkpoint))
                print(f"load: a server runs at {address}; now the test", file=sys.stderr)
                options = ["--host", address, *options]
            # Locust's own tables, whose percentiles are rounded, go there; ours follow on the terminal.
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            return _locust([*DEFAULTS, *users, "--json-file", os.path.join(folder, "locust"), *options])
    except StartError as error:
        print(f"load: the server did not start: {error}", file=sys.stderr)
        return START_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _given(options: Sequence[str], *names: str) -> bool:
    return any(each == name or each.startswith(f"{name}=") for each in options for name in names)


def _end(number: int, frame: object) -> NoReturn:
    """SIGTERM: leaves through the `with` blocks, so that nothing stays behind."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _server(checkpoint: Sequence[str]) -> Iterator[str]:
    """The address of a server that is ready; it is stopped with the block. Raises StartError."""
    command = [sys.executable, "-m", "pellucid_client.cli", "serve", *checkpoint]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "off", "--log-format", "json"]
    # A session of its own: Ctrl-C is for Locust, which then ends the run and reports.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True, encoding="utf-8"
    )
    with process:
        try:
            if process.stderr is None:
                raise StartError("its log was not piped")
            events = _events(process.stderr)
            address = _address(events)
            threading.Thread(target=_show_problems, args=(events,), daemon=True).start()
            yield address
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


def _address(events: Iterator[dict[str, Any]]) -> str:
    last = "it said nothing"
    for event in events:
        if event["message"] == "serving":
            return str(event["grpc"])
        last = str(event["message"]) or last
    raise StartError(last)


def _show_problems(events: Iterator[dict[str, Any]]) -> None:
    for event in events:
        if event.get("level") in ("warning", "error", "critical"):
            print(f"server: {event['message']}", file=sys.stderr)


def _locust(options: Sequence[str]) -> int:
    """Runs Locust to its end and returns its exit code."""
    process = subprocess.Popen([sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), *options])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Locust has had it too.
    with process:
        try:
            return process.wait()
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
