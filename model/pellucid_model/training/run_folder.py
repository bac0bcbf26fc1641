"""What a run leaves on disk. Every file is replaced whole or not at all, except the log, which only grows.

    run.json      settings, corpus, versions; written once
    log.jsonl     a record per step, one per validation with its samples, and one where training diverged
    checkpoint/   what `pellucid serve` takes: config.json, model.safetensors and the tokenizer's files
    state.pt      what a resumed run goes on from
    loss.png, samples.txt   views of the log

A save writes checkpoint, state, views in this order. Records after the saved step belong to work that was lost; they
are dropped when the run is resumed.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from pellucid_model.training.curve import draw_curve
from pellucid_model.training.errors import TrainingError
from pellucid_model.training.models import TrainableModel
from pellucid_model.training.vocabulary import Vocabulary

Record = dict[str, Any]


class RunFolder:
    """An existing folder of a run; `create` and `open` make one of these."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings

    @classmethod
    def create(cls, path: Path, settings: dict[str, Any]) -> RunFolder:
        """Refuses a folder that holds a run already."""
        if (path / "run.json").exists():
            raise TrainingError(f"{path} holds a run already; go on with --resume, or name another folder with --out")
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path, settings)
        run._log.unlink(missing_ok=True)
        write_whole(path / "run.json", _json(settings))
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        try:
            settings = json.loads((path / "run.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TrainingError(f"{path} holds no run: run.json is missing") from None
        except ValueError as error:
            raise TrainingError(f"{path / 'run.json'} cannot be read: {error}") from None
        if not isinstance(settings, dict):
            raise TrainingError(f"{path / 'run.json'} must hold a JSON object")
        return cls(path, settings)

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def _log(self) -> Path:
        return self.path / "log.jsonl"

    def append(self, record: Record) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record, ensure_ascii=False) + "\n")

    def records(self) -> list[Record]:
        """The whole log. A last line that a crash cut short is left out; any other broken line is an error."""
        if not self._log.exists():
            return []
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise TrainingError(f"{self._log} cannot be read: {error}") from None

    def validations(self) -> list[Record]:
        return [record for record in self.records() if "validation_loss" in record]

    def drop_records_after(self, step: int) -> None:
        kept = [record for record in self.records() if record["step"] <= step]
        write_whole(self._log, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept).encode())

    def save_checkpoint(self, model: TrainableModel, vocabulary: Vocabulary, dtype: torch.dtype) -> None:
        """A folder that serves as it is. config.json is written last: where it stands, the rest is complete."""
        self.checkpoint.mkdir(parents=True, exist_ok=True)
        for name, content in vocabulary.files.items():
            write_whole(self.checkpoint / name, content)
        model.write(self.checkpoint, dtype)

    def save_views(self) -> None:
        records = self.records()
        draw_curve(records, self.path / "loss.png")
        write_whole(self.path / "samples.txt", _samples_text(records).encode())

    def save_state(self, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_whole(self.path / "state.pt", buffer.getvalue())

    def load_state(self) -> dict[str, Any]:
        path = self.path / "state.pt"
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise TrainingError(f"{self.path} cannot be resumed: state.pt is missing") from None
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError):
            raise TrainingError(f"{path} is broken; start the run again") from None
        if not isinstance(state, dict):
            raise TrainingError(f"{path} is not the state of a run")
        return state


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically, and only once its bytes have reached the disk."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, ensure_ascii=False, indent=2) + "\n").encode()


def _samples_text(records: list[Record]) -> str:
    parts = []
    for record in records:
        if "samples" in record:
            parts.append(f"step {record['step']}, validation loss {record['validation_loss']:.4f}\n")
            parts += [f"{sample}\n" for sample in record["samples"]] + ["\n"]
    return "".join(parts)
