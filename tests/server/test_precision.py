"""--dtype and --quantize: what is served, what is said of it, and that company still does not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from pellucid_model.errors import ModelError
from pellucid_server.engine.invariance import seems_invariant
from pellucid_server.engine.loading import Loaded, load
from pellucid_server.verify.serving import serve_sequence
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.stepping import configure

Quantize = Literal["none", "int8", "int4"]
PROMPT = [7, 3, 30, 11, 5, 19, 2, 2, 14, 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def served(checkpoint: Path, quantize: Quantize, dtype: str = "float32") -> Loaded:
    return load(configure(checkpoint, dtype=dtype, quantize=quantize))


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.05), ("int4", 0.25)])
def test_integers_come_close(checkpoint: Path, quantize: Quantize, error: float) -> None:
    exact, rounded = (serve_sequence(served(checkpoint, name), PROMPT, 4) for name in ("none", quantize))
    first, second = (torch.stack([run.logits[i] for i in range(len(PROMPT))]) for run in (exact, rounded))
    assert 0 < (second - first).norm() / first.norm() < error


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_does_not_matter(checkpoint: Path, quantize: Quantize, dtype: str) -> None:
    loaded = served(checkpoint, quantize, dtype)
    ready = loaded.ready
    assert ready.batch_invariant
    assert ready.dtype == f"{quantize}, {dtype}"
    assert seems_invariant(loaded.runner, loaded.pool, ready.vocab_size, ready.context_length)


def test_weights_are_counted_as_they_lie(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_config(d_model=128, d_ff=512, layers=4), tokenizer=False)
    sizes = [served(checkpoint, quantize).ready.weight_bytes for quantize in ("none", "int8", "int4")]
    assert sizes[0] > 3 * sizes[1]
    assert sizes[1] > 1.2 * sizes[2]


def test_torch_operators_do_not_quantize(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_KERNELS", "torch")
    with pytest.raises(ModelError, match="--quantize int8 needs the compiled CPU kernels"):
        served(checkpoint, "int8")


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, std=1e30)
    with pytest.raises(
        ModelError, match=r"cannot be served as int4: blocks\.0\.attention\.query: weight holds a number"
    ):
        served(checkpoint, "int4")
