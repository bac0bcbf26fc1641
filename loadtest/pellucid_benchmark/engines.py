"""The engines that can be compared: how each is started on a model, and where its files are.

Peers run in virtual environments of their own under PEERS, which loadtest/peers.sh makes; a peer that is not there is
left out with a notice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pellucid_benchmark.costs import Costs, costs_of
from pellucid_benchmark.models import BenchmarkModel
from pellucid_benchmark.processes import Worker, WorkerError
from pellucid_benchmark.servers import PellucidServer

PEERS = Path(__file__).resolve().parents[1] / ".peers"


@dataclass(frozen=True)
class Engine:
    """An engine in one precision, as `NAME:PRECISION`."""

    name: str
    precision: str
    environment: str
    """Its virtual environment under PEERS; "": the one that runs this."""
    script: str
    arguments: Callable[[BenchmarkModel, int], list[str]]
    """(model, threads) -> arguments of the worker; raises WorkerError where a file is missing."""

    @property
    def label(self) -> str:
        return f"{self.name}:{self.precision}"

    @property
    def python(self) -> Path:
        return PEERS / self.environment / "bin" / "python"


def _file(path: Path) -> str:
    if not path.exists():
        raise WorkerError(f"{path} is missing; run loadtest/peers.sh")
    return str(path)


def _llama_cpp(precision: str) -> Engine:
    def arguments(model: BenchmarkModel, threads: int) -> list[str]:
        file = _file(PEERS / "models" / f"{model.name}-{precision}.gguf")
        return [file, str(threads), "32", str(min(model.context, 2048))]

    return Engine("llama.cpp", precision, "llama-cpp", "run_llama_cpp.py", arguments)


def _openvino(precision: str, weights: str, hint: str) -> Engine:
    def arguments(model: BenchmarkModel, threads: int) -> list[str]:
        return [_file(PEERS / "models" / f"{model.name}-openvino-{weights}"), str(threads), hint]

    return Engine("openvino", precision, "openvino", "run_openvino.py", arguments)


def _ctranslate2(precision: str) -> Engine:
    def arguments(model: BenchmarkModel, threads: int) -> list[str]:
        return [_file(PEERS / "models" / f"{model.name}-ctranslate2-{precision}"), str(threads), precision]

    return Engine("ctranslate2", precision, "ctranslate2", "run_ctranslate2.py", arguments)


def _onnxruntime(precision: str) -> Engine:
    def arguments(model: BenchmarkModel, threads: int) -> list[str]:
        return [_file(PEERS / "models" / f"{model.name}-onnxruntime-{precision}"), str(threads)]

    return Engine("onnxruntime", precision, "onnxruntime", "run_onnxruntime.py", arguments)


def _vllm(precision: str) -> Engine:
    def arguments(model: BenchmarkModel, threads: int) -> list[str]:
        return [_file(model.folder), str(threads), precision, str(min(model.context, 2048))]

    return Engine("vllm", precision, "vllm", "run_vllm.py", arguments)


def _transformers(precision: str) -> Engine:
    def arguments(model: BenchmarkModel, threads: int) -> list[str]:
        return [_file(model.folder), str(threads), precision]

    return Engine("transformers", precision, "transformers", "run_transformers.py", arguments)


PEER_ENGINES: dict[str, Engine] = {
    engine.label: engine
    for engine in (
        *(_llama_cpp(precision) for precision in ("f32", "bf16", "q8_0", "q4_0")),
        _openvino("f32", "fp32", "f32"),
        _openvino("bf16", "fp32", "bf16"),
        _openvino("int8", "int8", "f32"),
        _openvino("int4", "int4", "f32"),
        *(_ctranslate2(precision) for precision in ("float32", "int8")),
        *(_onnxruntime(precision) for precision in ("fp32", "int8", "int4")),
        *(_vllm(precision) for precision in ("float32", "bfloat16")),
        *(_transformers(precision) for precision in ("float32", "bfloat16")),
    )
}


class Running:
    """An engine that is loaded and waits."""

    def __init__(self, label: str, model: BenchmarkModel, threads: int, logs: Path) -> None:
        """Raises WorkerError."""
        self.label = label
        self.server: PellucidServer | None = None
        self.costs: Costs | None = None
        """Pellucid's alone."""
        log = logs / f"{label.replace(':', '-')}.log"
        if label.startswith("pellucid:"):
            precision = label.removeprefix("pellucid:")
            self.costs = costs_of(model.folder, precision)
            self.server = PellucidServer(model.folder, precision, threads)
            try:
                self.worker = Worker(Path(sys.executable), "run_pellucid.py", [self.server.address], log)
            except WorkerError:
                self.server.close()
                raise
        else:
            engine = PEER_ENGINES[label]
            if not engine.python.exists():
                raise WorkerError(f"{engine.python} is missing; run loadtest/peers.sh {engine.environment}")
            self.worker = Worker(engine.python, engine.script, engine.arguments(model, threads), log)

    @property
    def pids(self) -> list[int]:
        return [self.worker.pid, *([self.server.pid] if self.server else [])]

    @property
    def serving_pids(self) -> list[int]:
        """For Pellucid the server's two, without the client."""
        return self.server.processes() if self.server else [self.worker.pid]

    def sleep(self) -> None:
        """Stop a peer, which may spin while it waits; Pellucid sleeps by itself, and its watchdog would mind."""
        if self.server is None:
            self.worker.sleep()

    def wake(self) -> None:
        if self.server is None:
            self.worker.wake()

    def close(self) -> None:
        self.worker.close()
        if self.server:
            self.server.close()
