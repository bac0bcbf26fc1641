"""Metrics: documented ones and exported ones agree, every request is counted once, and series stay few."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pellucid.v1 import inference_pb2_grpc, server_pb2
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_server.engine.messages import StepDone
from pellucid_server.metrics import EngineMetrics, Metrics
from pellucid_server.rpc.calls import Call, Calls
from pellucid_testing.calls import GENERATE, failure, generate, request
from pellucid_testing.scripted_engine import Script, ready
from pellucid_testing.server import ServerProcess, serve
from pellucid_testing.stats import stats

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
CONTEXT = 4096
READY = ready(Script(lives="", kv_block_size=4, kv_block_count=16))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "config.json").write_text(json.dumps({}))
    CharacterTokenizer.train(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"]).save(folder)
    size: dict[str, Any] = {"context_length": CONTEXT, "kv_block_count": CONTEXT}
    script = Script(lives=str(folder / "lives"), step_seconds=0.002, **size)
    with serve(folder, "--context-overflow", "reject", program=script.program()) as running:
        yield running


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Names with type and labels, from the tables."""
    found = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = (cells[1], tuple(sorted(re.findall(r"`(\w+)`", cells[3]))))
    return found


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    found = {}
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, tuple(sorted(labels)))
    return found


async def nothing(message: server_pb2.GetLoadRequest, call: Call) -> server_pb2.GetLoadResponse:
    return server_pb2.GetLoadResponse()


def test_the_document_lists_exactly_what_is_exported() -> None:
    metrics = Metrics("m", os.getpid)
    metrics.engine.ready(READY, "1.2.3")
    Calls("instance", metrics).unary("GetLoad", server_pb2.GetLoadRequest, nothing)
    gpu = stats(gpu_allocated_bytes=1, gpu_reserved_bytes=2)
    metrics.engine.step(StepDone([], gpu, [1.0]), 1.0)
    assert exported(metrics.registry) == documented()


def test_counters_survive_an_engine_restart() -> None:
    registry = CollectorRegistry()
    engine = EngineMetrics(registry, "m")

    def step(preemptions: int, prefill: int, queried: int = 0, hit: int = 0) -> None:
        totals = {"preemptions_total": preemptions}
        totals |= {"prefix_queried_tokens_total": queried, "prefix_hit_tokens_total": hit}
        totals |= {"drafted_tokens_total": 3 * queried, "accepted_tokens_total": 2 * hit}
        blocks = {"used_blocks": 3, "cached_blocks": 1, "free_blocks": 8}
        engine.step(StepDone([], stats(**blocks, prefill_tokens_total=prefill, **totals), [1.0]), 1.0)

    def total(name: str) -> float | None:
        return registry.get_sample_value(f"pellucid_{name}_total", {"model_name": "m"})

    engine.ready(READY, "v")
    step(2, 10)
    step(3, 15, queried=8, hit=4)
    engine.down()
    assert registry.get_sample_value("pellucid_engine_up") == 0
    engine.ready(READY, "v")
    step(1, 4, queried=2, hit=1)
    assert (total("preemptions"), total("prefill_tokens")) == (4, 19)
    assert (total("prefix_cache_queried_tokens"), total("prefix_cache_hit_tokens")) == (10, 5)
    assert (total("drafted_tokens"), total("accepted_tokens")) == (30, 10)
    blocks = [{"model_name": "m", "state": state} for state in ("used", "cached", "free")]
    assert [registry.get_sample_value("pellucid_kv_cache_blocks", labels) for labels in blocks] == [3, 1, 8]
    assert registry.get_sample_value("pellucid_kv_cache_usage_ratio", {"model_name": "m"}) == 0.25


def test_an_image_says_what_it_was_built_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("", "0123abc"):
        monkeypatch.setenv("PELLUCID_COMMIT", commit)
        registry = CollectorRegistry()
        EngineMetrics(registry, "m").ready(READY, "1.2.3")
        (sample,) = next(family for family in registry.collect() if family.name == "pellucid_build_info").samples
        assert sample.labels["commit"] == commit
        assert (sample.labels["version"], sample.labels["device"]) == ("1.2.3", "cpu")


def test_gpu_memory_is_there_with_a_gpu_alone() -> None:
    registry = CollectorRegistry()
    engine = EngineMetrics(registry, "m")

    def memory() -> list[float | None]:
        names = ("pellucid_gpu_memory_allocated_bytes", "pellucid_gpu_memory_reserved_bytes")
        return [registry.get_sample_value(name, {"device": "H"}) for name in names]

    engine.ready(msgspec.structs.replace(READY, device="H"), "v")
    engine.step(StepDone([], stats(), [1.0]), 1.0)
    assert memory() == [None, None]
    engine.step(StepDone([], stats(gpu_allocated_bytes=100, gpu_reserved_bytes=200), [1.0]), 1.0)
    assert memory() == [100, 200]
    engine.down()
    assert memory() == [None, None]


def test_idle_messages_are_no_steps() -> None:
    registry = CollectorRegistry()
    engine = EngineMetrics(registry, "m")
    engine.ready(READY, "v")
    engine.step(StepDone([], stats(), [1.0]), 1.0)
    assert registry.get_sample_value("pellucid_step_batch_size_count", {"model_name": "m"}) == 0


def test_steps_in_a_row_are_steps() -> None:
    registry = CollectorRegistry()
    engine = EngineMetrics(registry, "m")
    engine.ready(READY, "v")
    values = stats(step_sequences=3, step_tokens=3, step_seconds=0.5, step_phase="decode")
    engine.step(StepDone([], values, [10.0, 10.25, 11.25, 13.25]), 1.0)

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"pellucid_{name}", {"model_name": "m", **labels})

    assert sample("engine_step_duration_seconds_count", phase="decode") == 4
    assert sample("engine_step_duration_seconds_sum", phase="decode") == 0.5 + 0.25 + 1.0 + 2.0
    assert (sample("step_batch_size_count"), sample("step_batch_size_sum")) == (4, 12)
    assert (sample("step_tokens_count"), sample("step_tokens_sum")) == (4, 12)


def test_every_call_is_counted_once(server: ServerProcess) -> None:
    before = server.metrics()
    channel = server.channel()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    raw: Any = channel.unary_stream(GENERATE)
    tokens = 0
    for index in range(40):
        match index % 8:
            case 0:
                generate(channel, stopping={"max_new_tokens": 5})
                tokens += 5
            case 1:
                generate(channel, stopping={"max_new_tokens": 0})
            case 2:
                text = generate(channel, "ab", stopping={"max_new_tokens": 30, "stop_strings": ["c"]})
                assert text.reason == "stop_string"
                tokens += len(text.token_ids)
            case 3:
                failure(stub.Generate(request(sampling={"top_p": 0.0})))
            case 4:
                failure(stub.Generate(request("a" * 2 * CONTEXT)))
            case 5:
                failure(stub.Generate(request(model="nobody")))
            case 6:
                call = stub.Generate(request(stopping={"max_new_tokens": CONTEXT}))
                tokens_seen = len(next(call).outputs[0].token_ids)
                assert tokens_seen >= 1
                call.cancel()
                server.wait_for_metric("pellucid_requests_running", 0)
                server.wait_for_metric("pellucid_requests_waiting", 0)
            case 7:
                with pytest.raises(grpc.RpcError):
                    next(raw(b"\xff"))
    after = server.metrics()

    def gained(name: str, **labels: str) -> float:
        def total(samples: dict[str, float]) -> float:
            wanted = [f'{key}="{value}"' for key, value in labels.items()]
            return sum(v for k, v in samples.items() if k.split("{")[0] == name and all(w in k for w in wanted))

        return total(after) - total(before)

    finished = {"max_new_tokens": 10, "stop_string": 5, "client_cancelled": 5}
    for reason, count in finished.items():
        assert gained("pellucid_requests_finished_total", reason=reason) == count
    rejected = {"invalid_field": 10, "prompt_too_long": 5, "model_not_found": 5}
    for reason, count in rejected.items():
        assert gained("pellucid_request_rejections_total", reason=reason) == count
    assert gained("pellucid_requests_finished_total") + gained("pellucid_request_rejections_total") == 40
    assert gained("pellucid_requests_total", method="Generate") == 40
    assert gained("pellucid_requests_total", method="Generate", grpc_code="INVALID_ARGUMENT") == 15
    # Requests with a first token: all that finished, but those that asked for none.
    assert gained("pellucid_time_to_first_token_seconds_count") == 15
    assert gained("pellucid_e2e_request_latency_seconds_count") == 20
    assert gained("pellucid_request_prompt_tokens_sum") == gained("pellucid_prompt_tokens_total") == 15 * 6 + 5 * 3
    assert gained("pellucid_generated_tokens_total") == gained("pellucid_request_generated_tokens_sum") >= tokens + 5
    for name, value in after.items():
        if "_bucket" in name and 'le="+Inf"' in name:
            total = name.replace("_bucket", "_count").replace('le="+Inf",', "").replace(',le="+Inf"', "")
            assert after[total] == value


def test_series_do_not_grow_with_traffic(server: ServerProcess) -> None:
    channel = server.channel()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)

    def traffic(index: int) -> None:
        generate(channel, request_id=f"id{index}", stopping={"max_new_tokens": 1})
        failure(stub.Generate(request(model=f"model{index}"), metadata=[("x-request-id", f"h{index}")]))
        unknown: Any = channel.unary_unary(f"/pellucid.v1.InferenceService/Method{index}")
        with pytest.raises(grpc.RpcError):
            unknown(b"")

    for index in range(5):
        traffic(index)
    names = set(server.metrics())
    for index in range(5, 60):
        traffic(index)
    assert set(server.metrics()) == names


def test_both_processes_are_measured(server: ServerProcess) -> None:
    samples = server.metrics()
    assert samples["process_resident_memory_bytes"] > 10e6
    assert samples["pellucid_engine_process_resident_memory_bytes"] > 10e6
    assert samples["process_start_time_seconds"] != samples["pellucid_engine_process_start_time_seconds"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say() -> None:
    metrics: Any = Metrics("m", os.getpid)
    metrics.engine.ready(READY, "1.2.3")
    text = generate_latest(metrics.registry)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
