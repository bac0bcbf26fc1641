"""--dtype, --quantize and --kv-dtype: what is served, what is said of it, and that company still does not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pellucid_model.errors import ModelError
from pellucid_server.engine.loading import Loaded, load
from pellucid_server.verify.serving import serve_sequence
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.own_modules import CONTRACT
from pellucid_testing.stepping import Stepper, configure, same_in_company

Quantize = Literal["none", "int8", "int4"]
PROMPT = [7, 3, 30, 11, 5, 19, 2, 2, 14, 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def served(checkpoint: Path, quantize: Quantize = "none", dtype: str = "float32", **changes: Any) -> Loaded:
    return load(configure(checkpoint, dtype=dtype, quantize=quantize, **changes))


def logits_of(loaded: Loaded) -> Tensor:
    """[len(PROMPT), V]"""
    run = serve_sequence(loaded, PROMPT, 4)
    return torch.stack([run.logits[i] for i in range(len(PROMPT))])


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.05), ("int4", 0.25)])
def test_integers_come_close(checkpoint: Path, quantize: Quantize, error: float) -> None:
    first, second = logits_of(served(checkpoint)), logits_of(served(checkpoint, quantize))
    assert 0 < (second - first).norm() / first.norm() < error


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_does_not_matter(checkpoint: Path, quantize: Quantize, dtype: str) -> None:
    stepper = Stepper.of(checkpoint, dtype=dtype, quantize=quantize)
    assert stepper.loaded.ready.batch_invariant
    assert stepper.loaded.ready.dtype == f"{quantize}, {dtype}"
    assert same_in_company(stepper)


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


@pytest.mark.parametrize(
    ("quantize", "dtype", "kv_dtype", "said"),
    [
        ("none", "float32", "int8", "float32, KV cache int8"),
        ("int8", "bfloat16", "int8", "int8, bfloat16, KV cache int8"),
        ("none", "bfloat16", "float32", "bfloat16, KV cache float32"),
        ("none", "float32", "float32", "float32"),
    ],
)
def test_the_cache_has_a_format_of_its_own(
    checkpoint: Path, quantize: Quantize, dtype: str, kv_dtype: str, said: str
) -> None:
    stepper = Stepper.of(checkpoint, dtype=dtype, quantize=quantize, kv_dtype=kv_dtype)
    assert stepper.loaded.ready.dtype == said
    assert stepper.loaded.ready.batch_invariant
    assert same_in_company(stepper)


@pytest.mark.parametrize("name", CONTRACT)
def test_every_module_has_an_int8_cache(name: str, tmp_path: Path) -> None:
    folder, module = CONTRACT[name].checkpoint(tmp_path / "model"), CONTRACT[name].source
    first, second = (logits_of(served(folder, module=module, kv_dtype=kv_dtype)) for kv_dtype in ("auto", "int8"))
    assert 0 < (second - first).norm() / first.norm() < 0.02


def test_int8_holds_nearly_twice_the_tokens_of_bfloat16(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_config(head_dim=64), tokenizer=False)
    held = {
        kv_dtype: served(checkpoint, kv_dtype=kv_dtype, kv_cache_memory=2**21).ready
        for kv_dtype in ("float32", "bfloat16", "int8")
    }
    tokens = {kv_dtype: ready.kv_block_count * ready.kv_block_size for kv_dtype, ready in held.items()}
    assert 1.99 < tokens["bfloat16"] / tokens["float32"] < 2.01
    assert 1.87 < tokens["int8"] / tokens["bfloat16"] < 1.89  # 128 / (64 + 4)
    assert all(0.99 * 2**21 < ready.kv_bytes <= 2**21 for ready in held.values())


def test_torch_operators_keep_the_cache_in_the_models_format(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_KERNELS", "torch")
    assert served(checkpoint, kv_dtype="float32").ready.dtype == "float32"
    with pytest.raises(ModelError, match="--kv-dtype int8 needs the compiled CPU kernels"):
        served(checkpoint, kv_dtype="int8")


def test_heads_beyond_what_int8_sums_exactly_are_named(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, tiny_config(heads=1, kv_heads=1, head_dim=1032, layers=1))
    with pytest.raises(ModelError, match="--kv-dtype int8: the model has heads of 1032 dimensions; accepted: up to"):
        served(checkpoint, kv_dtype="int8")
