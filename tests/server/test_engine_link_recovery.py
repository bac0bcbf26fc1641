"""The real engine under pressure: killed and stopped in mid-stream, and with a cache too small for everybody."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pellucid.v1 import inference_pb2_grpc
from pellucid_testing.calls import Answer, collect, generate, request
from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.server import ServerProcess, serve

CONTEXT = 1024
BLOCKS = 64
BYTES_PER_BLOCK = 2 * 2 * 2 * 12 * 4 * 4  # layers, k and v, kv heads, head_dim, float32, tokens
STREAMS = 4
TOKENS = 180
"""Of each stream; four streams need about 200 blocks together."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", tiny_config(context_length=CONTEXT))
    cache = ("--kv-block-size", "4", "--kv-cache-memory", str(BLOCKS * BYTES_PER_BLOCK))
    with serve(folder, "--dtype", "float32", "--threads", "1", "--engine-timeout-seconds", "4", *cache) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[Answer]:
    """Each request alone."""
    channel = server.channel()
    return [generate(channel, "ab" * (i + 1), **options(i)) for i in range(STREAMS)]


def options(index: int) -> dict[str, Any]:
    return {
        "sampling": {"temperature": float(index % 2), "seed": index},
        "stopping": {"max_new_tokens": TOKENS + index, "ignore_eos": True, "stop_strings": ["never seen"]},
        "output": {"min_tokens_per_message": 1},  # so that none is over before the engine is killed
    }


def start_crowd(server: ServerProcess) -> list[Any]:
    """Streams that begin together."""
    stub = inference_pb2_grpc.InferenceServiceStub(server.channel())
    with server.engine_stopped():
        calls = [stub.Generate(request("ab" * (i + 1), **options(i)), timeout=60) for i in range(STREAMS)]
        server.wait_for_queue(STREAMS)
    return calls


def interrupted_crowd(server: ServerProcess, expected: list[Answer], number: signal.Signals) -> None:
    """Sends the engine a signal in the middle of a crowd, whose every stream must go on as if nothing had happened.

    They last for a tenth of a second. Where this process was kept waiting for so long, some have ended: once more.
    """
    for _ in range(5):
        restarts = server.metric("pellucid_engine_restarts_total")
        calls = start_crowd(server)
        first = next(calls[0])
        os.kill(server.engine_pid(), number)
        answers = [collect([first, *calls[0]]), *(collect(call) for call in calls[1:])]
        assert same(answers, expected)
        server.wait_for_metric("pellucid_engine_restarts_total", restarts + 1)
        server.wait_for_metric("pellucid_engine_up", 1)
        if [answer.timings.engine_recovery_count for answer in answers] == [1] * STREAMS:
            return
    raise AssertionError("the signal never came in the middle of all streams")


def same(answers: list[Answer], others: list[Answer]) -> bool:
    return [(a.token_ids, a.text, a.reason) for a in answers] == [(b.token_ids, b.text, b.reason) for b in others]


def test_streams_that_share_too_few_blocks_give_way_and_come_back(
    server: ServerProcess, expected: list[Answer]
) -> None:
    answers = [collect(call) for call in start_crowd(server)]
    assert same(answers, expected)
    assert sum(answer.timings.preemption_count for answer in answers) > 0
    assert server.metric("pellucid_preemptions_total") > 0
    server.wait_for_metric("pellucid_kv_cache_blocks", 0, state="used")


def test_streams_go_on_after_the_engine_was_killed(server: ServerProcess, expected: list[Answer]) -> None:
    recovered = server.metric("pellucid_streams_recovered_total")
    interrupted_crowd(server, expected, signal.SIGKILL)
    assert server.metric("pellucid_streams_recovered_total") >= recovered + STREAMS
    server.wait_for_metric("pellucid_kv_cache_blocks", 0, state="used")


def test_streams_go_on_after_the_engine_hung(server: ServerProcess, expected: list[Answer]) -> None:
    """Stopped in the middle of its work, the engine holds its socket and says nothing more."""
    interrupted_crowd(server, expected, signal.SIGSTOP)
    assert server.metric("pellucid_engine_restarts_total", reason="hung") >= 1
    server.wait_for_metric("pellucid_kv_cache_blocks", 0, state="used")


def test_counters_of_the_engine_outlive_it(server: ServerProcess) -> None:
    """Two engines are gone by now."""
    names = ("pellucid_prefill_tokens_total", "pellucid_preemptions_total", "pellucid_generated_tokens_total")
    before = [server.metric(name) for name in names]
    assert all(before)
    server.restart_engine()
    assert [server.metric(name) for name in names] == before
    generate(server.channel(), "abc", stopping={"max_new_tokens": 2, "ignore_eos": True})
    assert server.metric("pellucid_prefill_tokens_total") == before[0] + 4
    assert server.metric("pellucid_generated_tokens_total") == before[2] + 2
