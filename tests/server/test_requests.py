"""The table of live requests: bounds, counts, and that a request ends exactly once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from pellucid_server import errors
from pellucid_server.engine.messages import (
    Finished,
    Sampling,
)
from pellucid_server.kv.window import ContextWindow
from pellucid_server.live_request import Plan, window_moves
from pellucid_server.readiness import Readiness
from pellucid_server.requests import RequestTable
from pellucid_testing.live_requests import Bench, nonzero


async def test_admission_is_bounded_and_room_returns() -> None:
    bench = Bench(max_live=2)
    first = bench.admit("1")
    bench.admit("2")
    with pytest.raises(errors.QueueFull, match="2 of 2 places"):
        bench.admit("3")
    bench.table.abandon(first)
    bench.admit("3")


async def test_an_id_is_in_use_until_its_request_has_ended() -> None:
    bench = Bench()
    first = bench.start("same")
    with pytest.raises(errors.RequestIdInUse, match="'same'"):
        bench.admit("same")
    bench.token(first, "a", Finished("max_new_tokens"))
    bench.admit("same")


async def test_admission_follows_readiness_and_deadline() -> None:
    bench = Bench()
    with pytest.raises(errors.DeadlineExceeded):
        bench.admit(deadline=time.monotonic() - 1)
    bench.readiness.engine_down()
    with pytest.raises(errors.EngineDown):
        bench.admit()
    bench.readiness.drain()
    with pytest.raises(errors.Draining):
        bench.admit()
    loading = Bench()
    loading.readiness = Readiness()
    loading.table = RequestTable(loading.engine, loading.readiness, loading.metrics, 4)
    with pytest.raises(errors.ModelLoading):
        loading.admit()


async def test_a_request_ends_once_whatever_comes_later() -> None:
    bench = Bench()
    request = bench.start()
    bench.token(request, "a")
    bench.token(request, "b", Finished("eos", 2))
    end = request.end
    assert end is not None
    assert end.reason == "eos"
    bench.token(request, "c")
    bench.table.cancel("r")
    bench.table.abandon(request)
    bench.table.fail(request, errors.InternalError("x"))
    bench.table.engine_down()
    bench.table.shut_down()
    assert request.end is end
    assert bench.finished() == {"eos": 1}
    assert bench.engine.aborted == []
    # The token that is the end token counts, and has no text.
    batch = request.outbox.take()
    assert len(batch.outputs[0].token_ids) == 2
    assert batch.outputs[0].text == "a"


@pytest.mark.parametrize("state", ["admitted", "submitted", "running"])
@pytest.mark.parametrize(
    ("event", "reason"),
    [("cancel", "cancelled"), ("abandon", "client_cancelled"), ("shut_down", "shutdown"), ("time", "time_limit")],
)
async def test_every_end_in_every_state(state: str, event: str, reason: str) -> None:
    bench = Bench()
    limit: dict[str, Any] = {"time_limit": 0.01} if event == "time" else {}
    request = bench.admit(**limit) if state == "admitted" else bench.start(**limit)
    if state == "running":
        bench.token(request, "a")
    match event:
        case "cancel":
            assert bench.table.cancel("r")
        case "abandon":
            bench.table.abandon(request)
        case "shut_down":
            bench.table.shut_down()
        case "time":
            request.outbox.take()
            await request.outbox.wait()
    assert request.end is not None
    assert request.end.reason == reason
    assert bench.finished() == {reason: 1}
    assert bench.engine.aborted == ([] if state == "admitted" else [request.key])
    assert bench.table.running_count == bench.table.waiting_count == 0
    assert not bench.table.cancel("r")
    bench.table.release(request)
    await asyncio.wait_for(bench.table.wait_until_released(), 30)


async def test_an_abandoned_request_past_its_deadline_counts_as_deadline() -> None:
    bench = Bench()
    request = bench.start(deadline=time.monotonic() + 100)
    request.deadline = time.monotonic()
    bench.table.abandon(request)
    assert bench.finished() == {"deadline": 1}
    assert nonzero(bench.metrics.cancellations) == {"deadline": 1}


async def test_refusals_after_admission_are_rejections_not_ends() -> None:
    bench = Bench()
    request = bench.admit()
    bench.table.fail(request, errors.PromptTooLong([errors.Violation("text", "is long")]))
    bench.table.refuse(errors.QueueFull("full"))
    assert bench.finished() == {}
    assert nonzero(bench.metrics.rejections) == {"prompt_too_long": 1, "queue_full": 1}


async def test_gauges_follow() -> None:
    bench = Bench()
    first, _ = bench.start("1"), bench.start("2")
    assert bench.sample("pellucid_requests_waiting") == 2
    bench.token(first, "a")
    assert (bench.table.running_count, bench.table.waiting_count) == (1, 1)
    bench.table.engine_down()
    assert (bench.table.running_count, bench.table.waiting_count) == (0, 2)
    bench.table.shut_down()
    assert bench.sample("pellucid_requests_running") == bench.sample("pellucid_requests_waiting") == 0


async def test_window_moves_and_dropped_tokens_are_counted_at_the_end() -> None:
    bench = Bench()
    for context, overflow, moves, unseen in (
        (ContextWindow("roll", 1, 2), "roll", 2, 2),
        (ContextWindow("reencode", 0, 3, 2), "reencode", 1, 2),
    ):
        request = bench.admit()
        plan = Plan([1, 2, 3], 3, 0, Sampling(0.0, 0, 1.0, 0.0, 7), 3, 0, [], [], 6, overflow, context)
        bench.table.start(request, plan, lambda: None)
        for finished in (None, None, Finished("max_new_tokens")):
            bench.token(request, "a", finished)
        assert window_moves(request, plan) == moves
        assert nonzero(bench.metrics.window_moves)[overflow] == moves
        assert nonzero(bench.metrics.dropped_context_tokens)[overflow] == unseen
