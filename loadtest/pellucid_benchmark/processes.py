"""Workers and servers as child processes, and how much of the processors each takes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).with_name("workers")
START_SECONDS = 600.0
RUN_SECONDS = 300.0
QUIET = 0.07
"""Share of the processors that others may take during a run that counts."""
_TICK = os.sysconf("SC_CLK_TCK")


class WorkerError(Exception):
    """A worker did not start, or could not do what it was asked; one line."""


class Worker:
    """One engine's worker. `sleep` and `wake` stop and continue it, so that an engine that spins disturbs no other."""

    def __init__(self, python: Path, script: str, arguments: Sequence[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), str(WORKERS / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        try:
            self.about: dict[str, Any] = self._read(START_SECONDS)["ready"]
        except WorkerError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises WorkerError."""
        if self._process.stdin is None:
            raise WorkerError("the worker has no standard input")
        with contextlib.suppress(BrokenPipeError):  # It is dead then, and reading says so.
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self._read(RUN_SECONDS)

    def sleep(self) -> None:
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), self._process:
            pass

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _read(self, seconds: float) -> dict[str, Any]:
        """The next answer of the worker, which is killed where it takes longer. Other lines are an engine's own."""
        rang = threading.Event()

        def kill() -> None:
            rang.set()
            self._signal(signal.SIGKILL)

        alarm = threading.Timer(seconds, kill)
        alarm.start()
        try:
            line = next((each for each in self._process.stdout or () if each.startswith(b"{")), b"")
        finally:
            alarm.cancel()
        if not line:
            self._process.wait()
            why = "took too long" if rang.is_set() else f"ended with code {self._process.returncode}"
            raise WorkerError(f"worker {why}; its output is in {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer


@dataclass
class Load:
    """What the processors did in an interval, as shares of all of them."""

    own: float = 0.0
    """The processes that were measured."""
    foreign: float = 0.0
    """Everything else, time stolen by other virtual machines included."""

    @property
    def quiet(self) -> bool:
        return self.foreign <= QUIET

    @property
    def remark(self) -> str:
        """Behind the line of a run."""
        return "" if self.quiet else f"   noisy: others took {100 * self.foreign:.0f} %"


@contextlib.contextmanager
def watching(pids: Sequence[int]) -> Iterator[Load]:
    """Fills the Load when the block ends; pids count with all their descendants."""
    load = Load()
    began, busy, own = time.monotonic(), _busy_seconds(), _seconds_of(pids)
    yield load
    capacity = (time.monotonic() - began) * (os.cpu_count() or 1)
    load.own = (_seconds_of(pids) - own) / capacity
    load.foreign = max(0.0, (_busy_seconds() - busy) / capacity - load.own)


def _busy_seconds() -> float:
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / _TICK


def _seconds_of(pids: Sequence[int]) -> float:
    """CPU time of processes and their living descendants."""
    times: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                times[int(entry.name)] = sum(map(int, fields[11:15])) / _TICK
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = set[int](), list(pids)
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += children.get(pid, [])
    return sum(times.get(pid, 0.0) for pid in found)


def resident_mib(pids: Sequence[int]) -> float:
    """Resident memory of processes, in MiB; shared pages count once for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1])
    return total / 1024
