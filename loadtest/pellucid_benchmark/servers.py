"""A Pellucid server of the benchmark's own, on a free port."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from pellucid_benchmark.models import BenchmarkModel
from pellucid_benchmark.processes import WorkerError

PRECISIONS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantize", "int8"),
    "int4": ("--quantize", "int4"),
}
STOP_SECONDS = 20.0


class PellucidServer:
    """Serves from construction to `close`."""

    def __init__(self, model: BenchmarkModel, precision: str, threads: int, log: Path) -> None:
        """Raises WorkerError where the server does not start."""
        if precision not in PRECISIONS:
            raise WorkerError(f"pellucid:{precision}: the precision must be one of {', '.join(PRECISIONS)}")
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pellucid_client.cli", "serve", str(model.folder), *PRECISIONS[precision]]
        command += ["--listen", "127.0.0.1:0", "--metrics-listen", "off", "--log-format", "json"]
        command += ["--threads", str(threads)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.address = ""
        lines: list[str] = []
        for line in self._process.stderr or ():
            lines.append(line)
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("message") == "serving":
                self.address = event["grpc"]
                break
        log.write_text("".join(lines))
        if not self.address:
            self._process.wait()
            raise WorkerError(f"the server did not start; its output is in {log}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def processes(self) -> list[int]:
        """The frontend and its engine."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
