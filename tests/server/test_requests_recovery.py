"""Live requests while engines die and come back."""

from __future__ import annotations

from pellucid_server import errors
from pellucid_server.engine.messages import (
    Finished,
    LogprobWish,
    Progress,
    Sampling,
    Submit,
)
from pellucid_server.live_request import EngineOptions, Plan
from pellucid_testing.live_requests import Bench


async def test_a_new_engine_goes_on_where_the_old_one_stopped() -> None:
    bench = Bench()
    running, waiting, admitted = bench.start("1"), bench.start("2"), bench.admit("3")
    bench.token(running, "a")
    bench.token(running, "b")
    bench.engine.sent.clear()
    bench.readiness.engine_down()
    bench.table.engine_down()
    bench.table.engine_up()
    bench.readiness.engine_up()
    first, second = bench.engine.sent
    assert isinstance(first, Submit)
    assert isinstance(second, Submit)
    assert (first.key, first.generated) == (running.key, running.sequences[0].generated)
    assert len(first.generated) == 2
    assert (second.key, second.generated) == (waiting.key, [])
    assert first.sampling.seed == 7
    assert first.at_once, "what an engine has died of may come again"
    assert (running.recoveries, waiting.recoveries, admitted.recoveries) == (1, 1, 0)
    bench.token(running, "c", Finished("max_new_tokens"))
    batch = running.outbox.take()
    assert batch.outputs[0].text == "abc"
    assert len(batch.outputs[0].token_ids) == 3


async def test_a_plan_made_while_the_engine_is_away_is_submitted_to_the_next() -> None:
    bench = Bench()
    request = bench.admit()
    bench.readiness.engine_down()
    bench.table.engine_down()
    bench.table.start(request, Plan([1], 1, 0, Sampling(0.0, 0, 1.0, 0.0, 0), 4, 0, [], [], 64), lambda: None)
    assert bench.engine.sent == []
    bench.table.engine_up()
    assert [message.key for message in bench.engine.sent] == [request.key]


async def test_three_deaths_without_progress_end_a_request() -> None:
    bench = Bench()
    stuck, lively = bench.start("stuck"), bench.start("lively")
    for _ in range(2):
        bench.table.engine_down()
        bench.table.engine_up()
        bench.token(lively, "a")
    bench.table.engine_down()
    assert stuck.end is not None
    assert isinstance(stuck.end.error, errors.EngineDown)
    assert lively.end is None
    assert bench.finished() == {"engine_down": 1}


async def test_a_request_that_waited_has_no_part_in_the_death_of_an_engine() -> None:
    bench = Bench(max_running=1)
    running, waiting = bench.start("running"), bench.start("waiting")
    for _ in range(3):
        bench.table.engine_down()
        bench.table.engine_up()
    assert isinstance(running.end and running.end.error, errors.EngineDown)
    assert waiting.end is None


async def test_who_runs_first_by_priority_is_charged_with_an_engines_death() -> None:
    bench = Bench(max_running=1)
    early = bench.start("early")
    urgent = bench.admit("urgent")
    plan = Plan([1], 1, 0, Sampling(0.0, 0, 1.0, 0.0, 0), 4, 0, [], [], 64, options=EngineOptions(priority=1))
    bench.table.start(urgent, plan, lambda: None)
    for _ in range(3):
        bench.table.engine_down()
        bench.table.engine_up()
    assert isinstance(urgent.end and urgent.end.error, errors.EngineDown)
    assert early.end is None


async def test_preemptions_add_up_over_engines() -> None:
    bench = Bench()
    request = bench.start()
    bench.step(Progress(request.key, [5], None, 1.0, 2))
    bench.table.engine_down()
    bench.table.engine_up()
    bench.step(Progress(request.key, [6], None, 9.0, 1))
    assert request.preemptions == 3
    assert request.first_scheduled_at == 1.0


async def test_a_new_engine_gets_the_sequences_that_are_left() -> None:
    bench = Bench()
    wish = LogprobWish(top_count=1)
    request = bench.start_many(3, EngineOptions(priority=5, prompt_logprobs=wish, cache_salt="s"))
    first = [message for message in bench.engine.sent if isinstance(message, Submit)]
    assert [each.prompt_logprobs for each in first] == [wish, None, None]
    assert {(each.priority, each.cache_salt) for each in first} == {(5, "s")}
    bench.token_of(request, 0, "a", Finished("max_new_tokens"))
    bench.token_of(request, 2, "b")
    bench.engine.sent.clear()
    bench.table.engine_down()
    bench.table.engine_up()
    again = [message for message in bench.engine.sent if isinstance(message, Submit)]
    assert [(each.sequence_index, len(each.generated)) for each in again] == [(1, 0), (2, 1)]
    assert {each.group for each in again} == {again[0].key}
    # Nothing has been told of the prompt, so the first of those that are left is asked for it.
    assert [each.prompt_logprobs for each in again] == [wish, None]
    bench.token_of(request, 1, "c", Finished("max_new_tokens"))
    bench.engine.sent.clear()
    bench.table.engine_down()
    bench.table.engine_up()
    (last,) = bench.engine.sent
    assert isinstance(last, Submit)
    assert (last.sequence_index, last.group) == (2, None)
