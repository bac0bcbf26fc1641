"""A Pellucid server of the benchmark's own, on a free port."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pellucid_benchmark.models import BenchmarkModel
from pellucid_benchmark.processes import WorkerError
from pellucid_loadtest.own_server import StartError, own_server

PRECISIONS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantize", "int8"),
    "int4": ("--quantize", "int4"),
}


class PellucidServer:
    """Serves from construction to `close`."""

    def __init__(self, model: BenchmarkModel, precision: str, threads: int) -> None:
        """Raises WorkerError where the server does not start."""
        if precision not in PRECISIONS:
            raise WorkerError(f"pellucid:{precision}: the precision must be one of {', '.join(PRECISIONS)}")
        self._running = contextlib.ExitStack()
        try:
            server = self._running.enter_context(
                own_server([str(model.folder), *PRECISIONS[precision], "--threads", str(threads)])
            )
        except StartError as error:
            raise WorkerError(f"the server did not start: {error}") from None
        self.address, self.pid = server.address, server.pid

    def processes(self) -> list[int]:
        """The frontend and its engine."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]

    def close(self) -> None:
        self._running.close()
