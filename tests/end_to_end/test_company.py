"""A crowd of streams through the public API: each bit-equal to its lone run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from pellucid_client import AsyncClient, Completion
from pellucid_testing.checkpoints import CHARACTERS, tiny_checkpoint, tiny_config
from pellucid_testing.server import ServerProcess, serve

STREAMS = 32


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = tiny_config(norm="rmsnorm", activation="swiglu", context_length=512)
    folder = tiny_checkpoint(tmp_path_factory.mktemp("company") / "tiny", config)
    with serve(folder, "--dtype", request.param, "--threads", "1", "--max-step-tokens", "96") as running:
        yield running


def request(index: int) -> dict[str, Any]:
    """Different lengths and settings: greedy, seeded, filtered, with stops, long and short prompts."""
    length = 1 + (index * 37) % 300
    settings: dict[str, Any] = {
        "prompt": "".join(CHARACTERS[(index * 7 + i * i) % len(CHARACTERS)] for i in range(length)),
        "max_new_tokens": 20 + (index * 13) % 60,
        "temperature": (index % 5) * 0.5,
        "seed": index,
        "ignore_eos": index % 3 == 0,
    }
    if index % 4 == 1:
        settings |= {"top_k": 1 + index, "top_p": 0.9}
    if index % 4 == 2:
        settings |= {"min_p": 0.02, "min_new_tokens": 5}
    if index % 4 == 3:
        settings |= {"stop": ["天", "ab"]}
    return settings


async def test_streams_in_a_crowd_equal_lone_runs(server: ServerProcess) -> None:
    async with AsyncClient(server.address) as client:

        async def run(index: int) -> Completion:
            return await client.generate(**request(index)).result()

        alone = [await run(index) for index in range(STREAMS)]
        steps = server.metric("pellucid_step_batch_size_count")
        sizes = server.metric("pellucid_step_batch_size_sum")
        with server.engine_stopped():
            running = [asyncio.create_task(run(index)) for index in range(STREAMS)]
            await asyncio.to_thread(server.wait_for_queue, STREAMS)
        crowd = await asyncio.gather(*running)
    for one, other in zip(alone, crowd, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.finish == other.finish
    assert len({answer.token_ids for answer in alone}) > STREAMS // 2, "the answers hardly differ from each other"
    mean = (server.metric("pellucid_step_batch_size_sum") - sizes) / (
        server.metric("pellucid_step_batch_size_count") - steps
    )
    assert mean > 2, "the crowd was not batched"
    assert server.metric("pellucid_requests_running") == server.metric("pellucid_requests_waiting") == 0
