"""`make bench` and growth.py: what they count is right, and a small run of each goes through a real server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import bench
from pellucid_benchmark.comparing import Medians, aims, precision_of
from pellucid_benchmark.costs import Costs, costs_of
from pellucid_benchmark.engines import PEER_ENGINES
from pellucid_benchmark.growing import BASE, PROMPT_PHASES, STEPS, Point, points, step_seconds
from pellucid_benchmark.growth_report import Growth, write_growth
from pellucid_benchmark.memory import memory_of
from pellucid_benchmark.precisions import PRECISIONS
from pellucid_benchmark.processes import Worker, WorkerError
from pellucid_benchmark.random_models import SHAPES, TINY, write_random_llama
from pellucid_benchmark.reporting import write_report
from pellucid_benchmark.scenarios import SCENARIOS
from pellucid_benchmark.servers import PellucidServer
from pellucid_benchmark.shares import share_of_limit
from pellucid_benchmark.under_load import Times, one_round, summary_of
from pellucid_client import Client
from pellucid_model.checkpoint import load_checkpoint
from pellucid_model.kernels import WeightFormat, accelerate, select_kernels, weight_bytes
from pellucid_model.kernels.cache_layout import INT8
from pellucid_server.engine.cache import bytes_per_block, learn_shapes

SMALL = TINY | {"max_position_embeddings": 2048, "num_hidden_layers": 2, "vocab_size": 2000, "num_key_value_heads": 2}
SINGLE = SCENARIOS[0]
PREFILL = next(each for each in SCENARIOS if each.name == "prefill-512")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    write_random_llama(path, SMALL, torch.float32)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PellucidServer]:
    server = PellucidServer(folder, "float32", 1, options=("--max-step-tokens", "512"))
    yield server
    server.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["bfloat16", "int4", "int8+int8-cache"])
def test_costs_are_those_of_the_model_that_is_served(tmp_path: Path, name: str, tied: bool) -> None:
    folder = tmp_path / "small"
    write_random_llama(folder, SMALL | {"tie_word_embeddings": tied}, torch.float32)
    costs, precision = costs_of(folder, name), PRECISIONS[name]
    checkpoint = load_checkpoint(folder)
    accelerate(checkpoint.model, select_kernels(torch.device("cpu")), cast("WeightFormat", precision.weights))
    assert costs.weight_bytes == pytest.approx(weight_bytes(checkpoint.model.float()), rel=0.05)
    shapes = learn_shapes(checkpoint.model, torch.device("cpu"))
    kv_dtype = INT8 if precision.cache == "int8" else torch.bfloat16
    assert 128 * costs.kv_token_bytes == bytes_per_block(shapes, 128, kv_dtype)
    weights = 2 * (128 * (128 + 32 + 32 + 128) + 3 * 128 * 512)
    assert costs.body_operations == 2 * weights
    assert costs.head_operations == 2 * 128 * 2000
    assert costs.prompt_operations(3) == (3 * 2 * weights + 2 * 128 * 2000, 6 * 4 * 2 * 128)
    assert costs.step_bytes(8, 100) - costs.step_bytes(4, 100) == 4 * 100 * costs.kv_token_bytes


COSTS = Costs(
    weight_bytes=2 * 10**9,
    read_bytes=10**9,
    kv_token_bytes=10**6,
    body_operations=10**9,
    head_operations=10**9,
    attention_operations=10**6,
)
LIMITS = {"read_gb_s": 40.0, "gemm_float32_gflop_s": 100.0, "gemm_bfloat16_gflop_s": 400.0, "gemm_int8_gflop_s": 800.0}


def test_share_of_the_limit() -> None:
    """128 + 64 tokens of context on average: 1.192 GB a token."""
    assert share_of_limit(SINGLE, 20.0, COSTS, "bfloat16", LIMITS) == pytest.approx(20 * 1.192 / 40)
    linear, attention = 513 * 10**9, 512 * 513 // 2 * 10**6
    rates = (("float32", 100, 100), ("bfloat16", 400, 400), ("int4", 800, 400), ("int4+int8-cache", 800, 800 / 2))
    for precision, rate, other in rates:
        least = (linear / rate + attention / other) / 10**9
        share = share_of_limit(PREFILL, 512 / (4 * least), COSTS, precision, LIMITS)
        assert share == pytest.approx(0.25)
    assert share_of_limit(SCENARIOS[1], 20.0, COSTS, "bfloat16", LIMITS) is None


def test_short_prompts_under_load(server: PellucidServer) -> None:
    before = server.counters()
    times = asyncio.run(one_round(server, random.Random(0), probes=3))
    steps = server.counters().steps_since(before)
    assert len(times.idle) == len(times.loaded) == 3
    assert min(times.idle) > 0
    assert steps.count >= 1 + 3 + 4 + 3, "short prompts, a long one of four steps, and the same under load"
    assert 0 < max(times.steps) < steps.seconds


def test_p99_is_held_against_twice_the_idle_one_and_a_step() -> None:
    found = summary_of([Times([0.010, 0.010], [0.050], [0.02]), Times([0.010], [0.050], [0.03])])
    assert found["loaded_to_allowed"] == pytest.approx(0.050 / (2 * 0.010 + 0.025))
    assert found["longest_step_ms"] == pytest.approx(25), "the median of the rounds' longest"
    assert found["prompts"] == 2


@pytest.mark.parametrize("batch", [1, 3])
def test_decode_steps_are_those_of_the_whole_batch(server: PellucidServer, batch: int) -> None:
    before = server.counters()
    seconds = asyncio.run(step_seconds(server, Point("decode", "small", batch, 40), random.Random(batch)))
    steps = server.counters().steps_since(before, ["decode"])
    assert steps.count >= STEPS
    assert 0 < seconds < steps.seconds
    with Client(server.address) as client:
        assert client.load().queued_request_count == 0


def test_a_prompt_is_all_of_its_steps(server: PellucidServer) -> None:
    before = server.counters()
    seconds = asyncio.run(step_seconds(server, Point("prefill", "small", 1, 1100), random.Random(0)))
    steps = server.counters().steps_since(before, PROMPT_PHASES)
    assert steps.count == 3, "512 + 512 + 76"
    assert seconds == pytest.approx(steps.seconds)


def test_memory_counts_what_was_used(server: PellucidServer, folder: Path) -> None:
    memory = memory_of(server, costs_of(folder, "float32"), 1000)
    assert memory["kv_cache_mib"] == pytest.approx(1000 * 2 * 2 * 32 * 4 / 2**20)
    assert memory["weights_mib"] == pytest.approx(folder.joinpath("model.safetensors").stat().st_size / 2**20, rel=0.01)
    assert memory["resident_mib"] > 100, "torch alone takes more"


def test_growth_report(tmp_path: Path) -> None:
    models = list(SHAPES)
    seconds = {point: 0.001 * (1 + place) for place, point in enumerate(points(models))}
    text = write_growth(tmp_path, Growth("bfloat16", 2, dict.fromkeys(models, COSTS), seconds))
    step = 1000 * seconds[Point("decode", BASE, 64, 200)]
    assert f"| 64 | {step:.2f} | {64 / step * 1000:.0f} |" in text
    assert all(f"\n| {model} |" in text for model in models)
    assert len(json.loads((tmp_path / "growth.json").read_text())["points"]) == len(seconds)
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def report() -> dict[str, Any]:
    """Two of Pellucid's engines and two peers in one scenario."""
    values = {"pellucid:bfloat16": 120, "pellucid:int8": 200, "llama.cpp:bf16": 100, "openvino:int8": 160}
    summaries = [
        {"engine": engine, "scenario": scenario, "value": value, "first_ms": 10.0, "share": share}
        | {"samples": 3, "quiet_samples": 3}
        for engine, value in values.items()
        for scenario, share in (("single", 0.9 if engine.startswith("pellucid") else None), ("streams-8", None))
    ]
    times = {"idle_median_ms": 5.0, "idle_p99_ms": 8.0, "loaded_median_ms": 90.0, "loaded_p99_ms": 100.0}
    times |= {"longest_step_ms": 84.0, "loaded_to_allowed": 1.0, "prompts": 40}
    model = {
        "summaries": summaries,
        "limits": [LIMITS],
        "resident_mib": dict.fromkeys(values, 500.0),
        "failures": {"vllm:bfloat16 single": "RuntimeError: no"},
        "under_load": {"pellucid:int8": times},
        "memory": {"pellucid:int8": {"resident_mib": 560.0, "weights_mib": 200.0, "kv_cache_mib": 40.0}},
    }
    return {"models": {"smollm2": model}, "start": {"median_seconds": 3.0}}


def test_ratios_to_peers() -> None:
    medians = Medians(report()["models"]["smollm2"])
    assert medians.ratio("pellucid:bfloat16", "single", "best bfloat16") == pytest.approx(1.2)
    assert medians.ratio("pellucid:bfloat16", "single", "best") == pytest.approx(120 / 160)
    assert medians.ratio("pellucid:int8", "single", "best int8") == pytest.approx(200 / 160)
    assert medians.ratio("pellucid:int8", "single", "llama.cpp:q8_0") is None
    assert precision_of("pellucid:int8+int8-cache") == "int8"
    assert {precision_of(engine) for engine in PEER_ENGINES} == {"float32", "bfloat16", "int8", "int4"}


def test_the_report_has_every_figure(tmp_path: Path) -> None:
    found = {each.what: each.measured for each in aims(report())}
    assert found["smollm2, single: bfloat16 / llama.cpp:bf16"] == pytest.approx(1.2)
    assert found["smollm2, single: bfloat16 / read bandwidth"] == 0.9
    assert found["smollm2, streams-8: int8 / best peer"] == pytest.approx(200 / 160)
    assert found["smollm2, memory: int8 / (1.3 × weights + KV cache + 400 MiB)"] == pytest.approx(0.8)
    assert len(found) == 7
    text = write_report(tmp_path, report())
    assert "| pellucid:bfloat16 | 1.20 / 0.75 | 1.20 / 0.75 |" in text
    assert "| pellucid:int8 | 90 % |" in text
    assert "| pellucid:int8 | 5.0 | 8.0 | 90.0 | 100.0 | 84.0 | 1.00 |" in text
    assert "| seconds until the bundled model is served | 3.00 | ≤ 5 |" in text
    assert "vllm:bfloat16 single failed: RuntimeError: no" in text
    assert (tmp_path / "bench.png").exists()


def test_make_bench(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(folder), "--engine", "pellucid:float32+int8-cache", "--rounds", "1", "--only", "single"]
    assert bench.main([*arguments, "--threads", "1", "--out", str(tmp_path)]) == 0
    model = json.loads((tmp_path / "bench.json").read_text())["models"]["small"]
    (sample,) = model["samples"]
    assert sample["value"] > 0
    limits = {key: (model["limits"][0][key] + model["limits"][1][key]) / 2 for key in model["limits"][0]}
    costs = costs_of(folder, "float32+int8-cache")
    share = share_of_limit(SINGLE, sample["value"], costs, "float32+int8-cache", limits)
    assert sample["share"] == pytest.approx(share)
    assert not model["failures"]
    assert "| pellucid:float32+int8-cache |" in capsys.readouterr().out


def test_a_worker_that_fails_says_so_every_time(server: PellucidServer, tmp_path: Path) -> None:
    """It is an error of its own, rather than an end of everything."""
    with pytest.raises(WorkerError, match=r"worker ended with code 1; its output is in .*log"):
        Worker(Path(sys.executable), "run_onnxruntime.py", ["nothing", "1"], tmp_path / "log")
    worker = Worker(Path(sys.executable), "run_pellucid.py", [server.address], tmp_path / "client.log")
    with pytest.raises(WorkerError, match="InvalidRequest"):
        worker.ask({"prompts": [[-1]], "new": 1})
    assert worker.ask({"prompts": [[7, 8]], "new": 3})["tokens"] == 3
    os.kill(worker.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended with code -9"):
            worker.ask({"prompts": [[7]], "new": 1})
    worker.sleep()
    worker.close()
