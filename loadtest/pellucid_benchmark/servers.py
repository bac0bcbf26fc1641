"""A Pellucid server of the benchmark's own, on a free port."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pellucid_benchmark.counters import Counters
from pellucid_benchmark.precisions import PRECISIONS
from pellucid_benchmark.processes import WorkerError
from pellucid_loadtest.own_server import StartError, own_server


class PellucidServer:
    """Serves from construction to `close`."""

    def __init__(self, folder: Path, precision: str, threads: int, options: Sequence[str] = ()) -> None:
        """Raises WorkerError where the server does not start."""
        if precision not in PRECISIONS:
            raise WorkerError(f"pellucid:{precision}: the precision must be one of {', '.join(PRECISIONS)}")
        self._running = contextlib.ExitStack()
        # Peers keep no prompts either; and a cache that only fills takes new memory in every run.
        fixed = ("--threads", str(threads), "--prefix-cache", "off")
        arguments = [str(folder), *PRECISIONS[precision].options, *fixed, *options]
        try:
            server = self._running.enter_context(own_server(arguments, metrics=True))
        except StartError as error:
            raise WorkerError(f"the server did not start: {error}") from None
        self.precision = precision
        self.address, self.pid, self._metrics = server.address, server.pid, server.metrics

    def counters(self) -> Counters:
        return Counters.read(self._metrics)

    def processes(self) -> list[int]:
        """The frontend and its engine."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]

    def close(self) -> None:
        self._running.close()


def bundled_start_seconds() -> float:
    """How long `pellucid serve` takes from the command until it serves the bundled checkpoint. Raises WorkerError."""
    try:
        with own_server([]) as server:
            return server.start_seconds
    except StartError as error:
        raise WorkerError(f"the server did not start: {error}") from None
