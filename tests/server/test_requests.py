"""The table of live requests: bounds, progress, engine restarts, and that a request ends exactly once."""

from __future__ import annotations

import asyncio
import time
from typing import Any, get_args

import pytest

from pellucid.v1.inference_pb2 import FinishReason
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_server import errors
from pellucid_server.delivery import (
    DEFAULT_PATIENCE,
    LOGPROB_BYTES,
    MAX_MESSAGE_BYTES,
    TOKEN_BYTES,
    DeliveryRules,
    Patience,
)
from pellucid_server.engine.messages import (
    Abort,
    Finished,
    FinishKind,
    LogprobWish,
    Progress,
    Sampling,
    StepDone,
    Submit,
    TokenLogprob,
)
from pellucid_server.kv.window import ContextWindow
from pellucid_server.live_request import NO_OPTIONS, EngineOptions, LiveRequest, Plan, window_moves
from pellucid_server.metrics import Metrics
from pellucid_server.readiness import Readiness
from pellucid_server.requests import RequestTable
from pellucid_server.rpc.messages import delta
from pellucid_server.served import DefaultSampling, ServedModel
from pellucid_server.text.stream import Delta, TextStream
from pellucid_testing.stats import stats

TOKENIZER = CharacterTokenizer.train(["abcdefghijklmnopqrstuvwxyz"])

MODEL = ServedModel(
    name="m",
    tokenizer=TOKENIZER,
    vocab_size=30,
    eos_ids=(2,),
    context_length=64,
    block_size=16,
    block_count=16,
    native_window=0,
    can_roll=True,
    longest_token=1,
    sampling=DefaultSampling(),
    default_max_new_tokens=16,
    max_new_tokens_limit=64,
    overflow="reject",
)


class Recorder:
    """An engine port that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Submit | Abort] = []

    def send(self, message: Submit | Abort) -> None:
        self.sent.append(message)

    @property
    def aborted(self) -> list[int]:
        return [message.key for message in self.sent if isinstance(message, Abort)]


class Bench:
    """A table with its surroundings; the engine is up."""

    def __init__(
        self, max_live: int = 4, patience: Patience = DEFAULT_PATIENCE, max_running: int | None = None
    ) -> None:
        self.engine = Recorder()
        self.readiness = Readiness()
        self.metrics = Metrics("m", lambda: 0)
        self.table = RequestTable(self.engine, self.readiness, self.metrics, max_live, patience, max_running)
        self.readiness.engine_up()

    def start_many(
        self, count: int, options: EngineOptions = NO_OPTIONS, stops: tuple[str, ...] = (), **limits: Any
    ) -> LiveRequest:
        request = self.admit("many", sequences=count, **limits)
        plan = Plan([1, 2, 3], 3, 0, Sampling(0.0, 0, 1.0, 0.0, 7), 100, 0, [2], [], 64, options=options)
        self.table.start(request, plan, lambda: TextStream(TOKENIZER, stops))
        return request

    def token_of(self, request: LiveRequest, index: int, letter: str, finished: Finished | None = None) -> None:
        (token,) = TOKENIZER.encode(letter, add_special_tokens=False)
        self.step(Progress(request.sequences[index].key, token, finished, time.monotonic(), 0))

    def admit(self, request_id: str = "r", **limits: Any) -> LiveRequest:
        limits = {"deadline": None, "time_limit": None, **limits}
        return self.table.admit(request_id, DeliveryRules(), **limits)

    def start(self, request_id: str = "r", stops: tuple[str, ...] = (), **limits: Any) -> LiveRequest:
        request = self.admit(request_id, **limits)
        plan = Plan([1, 2, 3], 3, 0, Sampling(0.0, 0, 1.0, 0.0, 7), 100, 0, [2], [], 64)
        self.table.start(request, plan, lambda: TextStream(TOKENIZER, stops))
        return request

    def step(self, *progress: Progress, running: int = 1) -> None:
        snapshot = stats(running=running, step_sequences=len(progress), step_tokens=1, step_phase="decode")
        self.table.engine_step(StepDone(list(progress), snapshot, time.monotonic()))

    def token(self, request: LiveRequest, letter: str, finished: Finished | None = None) -> None:
        (token,) = TOKENIZER.encode(letter, add_special_tokens=False)
        self.step(Progress(request.key, token, finished, time.monotonic(), 0))

    def finished(self) -> dict[str, float]:
        return _nonzero(self.metrics.finished)

    def sample(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": "m"})


def _nonzero(counters: Any) -> dict[str, float]:
    values = {label: counter._value.get() for label, counter in counters.items()}
    return {label: value for label, value in values.items() if value}


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
    await asyncio.wait_for(bench.table.wait_until_released(), 1)


async def test_an_abandoned_request_past_its_deadline_counts_as_deadline() -> None:
    bench = Bench()
    request = bench.start(deadline=time.monotonic() + 0.001)
    await asyncio.sleep(0.002)
    bench.table.abandon(request)
    assert bench.finished() == {"deadline": 1}
    assert _nonzero(bench.metrics.cancellations) == {"deadline": 1}


async def test_a_stop_string_ends_the_request_and_drops_the_rest() -> None:
    bench = Bench()
    request = bench.start(stops=("cd",))
    for letter in "abcde":
        bench.token(request, letter)
    assert request.end is not None
    assert (request.end.reason, request.end.matched_stop_string) == ("stop_string", "cd")
    assert len(request.sequences[0].generated) == 4
    batch = request.outbox.take()
    assert batch.outputs[0].text == "ab"
    assert len(batch.outputs[0].token_ids) == 4
    assert bench.engine.aborted == [request.key]


async def test_a_stop_string_on_the_last_token_wins_and_needs_no_abort() -> None:
    bench = Bench()
    request = bench.start(stops=("b",))
    bench.token(request, "a")
    bench.token(request, "b", Finished("max_new_tokens"))
    assert bench.finished() == {"stop_string": 1}
    assert bench.engine.aborted == []


async def test_held_text_is_flushed_at_other_ends() -> None:
    for end in ("cancel", "max_new_tokens", "eos"):
        bench = Bench()
        request = bench.start(stops=("abc",))
        bench.token(request, "a")
        if end == "cancel":
            bench.token(request, "b")
            bench.table.cancel("r")
        elif end == "eos":
            bench.token(request, "b")
            bench.step(Progress(request.key, 2, Finished("eos", 2), 0.0, 0))
        else:
            bench.token(request, "b", Finished("max_new_tokens"))
        assert request.outbox.take().outputs[0].text == "ab"


async def test_errors_of_the_engine_become_errors_of_the_call() -> None:
    bench = Bench()
    request = bench.start("x1")
    bench.step(Progress(request.key, None, Finished("non_finite"), 0.0, 0))
    assert request.end is not None
    assert isinstance(request.end.error, errors.NonFiniteLogits)
    assert "'x1'" in request.end.error.message
    late = bench.start("x2")
    bench.step(Progress(late.key, None, Finished("deadline"), None, 0))
    assert late.end is not None
    assert isinstance(late.end.error, errors.DeadlineExceeded)
    assert bench.finished() == {"non_finite_logits": 1, "deadline": 1}
    assert bench.sample("pellucid_non_finite_logits_total") == 1


async def test_a_reader_that_does_not_read_ends_its_request_alone() -> None:
    bench = Bench(patience=Patience(seconds=0.02, bytes=40))
    slow, fast = bench.start("slow"), bench.start("fast")
    bench.token(slow, "a")
    writer = asyncio.create_task(take_and_never_write(slow))
    await asyncio.sleep(0)
    for _ in range(9):
        bench.token(slow, "a")
        bench.token(fast, "a")
    assert slow.end is None
    await asyncio.sleep(0.03)
    bench.token(slow, "a")
    bench.token(fast, "a")
    assert isinstance(slow.end and slow.end.error, errors.SlowConsumer)
    assert bench.engine.aborted == [slow.key]
    assert fast.end is None
    assert bench.finished() == {"slow_consumer": 1}
    with pytest.raises(asyncio.CancelledError):
        await writer


async def test_an_output_beyond_one_message_ends_a_request_that_wants_it_in_one() -> None:
    """The answer grows for as long as the request may run, and cannot be sent in the end."""
    bench = Bench()
    request = bench.table.admit("r", DeliveryRules(final_only=True), deadline=None, time_limit=None)
    plan = Plan([1, 2, 3], 3, 0, Sampling(0.0, 0, 1.0, 0.0, 7), 10_000, 0, [2], [], 20_000)
    bench.table.start(request, plan, lambda: None)
    entry = TokenLogprob(5, -1.0, 1, ((1, -1.0, 1),) * 9999)
    steps = 0
    while request.end is None and steps < 1000:
        bench.step(Progress(request.key, 5, None, time.monotonic(), 0, logprob=entry))
        steps += 1
    assert steps == 4 * MAX_MESSAGE_BYTES // (10_000 * LOGPROB_BYTES + TOKEN_BYTES) + 1
    assert isinstance(request.end and request.end.error, errors.RequestTooLarge)
    assert bench.engine.aborted == [request.key]
    assert bench.finished() == {"request_too_large": 1}


async def take_and_never_write(request: LiveRequest) -> None:
    request.outbox.take()
    await asyncio.Event().wait()


async def test_a_request_whose_text_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TextStream):
        def push(self, token_id: int) -> Delta:
            raise KeyError("a character without a name")

    bench = Bench()
    broken, sound = bench.admit("broken"), bench.start("sound")
    plan = sound.plan
    assert plan is not None
    bench.table.start(broken, plan, lambda: Broken(TOKENIZER))
    progress = [Progress(request.key, 5, None, 0.0, 0) for request in (broken, sound)]
    bench.step(*progress, running=2)
    assert isinstance(broken.end and broken.end.error, errors.InternalError)
    assert "character" not in str(broken.end)
    assert bench.engine.aborted == [broken.key]
    assert sound.end is None
    assert len(sound.sequences[0].generated) == 1
    assert bench.finished() == {"engine_error": 1}


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


async def test_preemptions_add_up_over_engines() -> None:
    bench = Bench()
    request = bench.start()
    bench.step(Progress(request.key, 5, None, 1.0, 2))
    bench.table.engine_down()
    bench.table.engine_up()
    bench.step(Progress(request.key, 6, None, 9.0, 1))
    assert request.preemptions == 3
    assert request.first_scheduled_at == 1.0


async def test_a_step_may_bring_several_tokens() -> None:
    """Drafts that came true: the tokens of a step have no gap between them, and none counts behind a stop string."""
    bench = Bench()
    request = bench.start(stops=("cd",))
    ids = TOKENIZER.encode("abcde", add_special_tokens=False)
    bench.step(Progress(request.key, ids[0], None, 1.0, 0))
    ended = Finished("max_new_tokens")
    bench.step(*(Progress(request.key, token, ended if token == ids[-1] else None, 1.0, 0) for token in ids[1:]))
    assert request.sequences[0].generated == ids[:4]
    assert request.end is not None
    assert request.end.reason == "stop_string"
    assert bench.engine.aborted == [request.key]
    (output,) = request.outbox.take().outputs.values()
    assert (output.token_ids, output.text, output.token_count) == (ids[:4], "ab", 4)
    name = "pellucid_inter_token_latency_seconds_count"
    assert bench.metrics.registry.get_sample_value(name, {"model_name": "m"}) == 1


async def test_refusals_after_admission_are_rejections_not_ends() -> None:
    bench = Bench()
    request = bench.admit()
    bench.table.fail(request, errors.PromptTooLong([errors.Violation("text", "is long")]))
    bench.table.refuse(errors.QueueFull("full"))
    assert bench.finished() == {}
    assert _nonzero(bench.metrics.rejections) == {"prompt_too_long": 1, "queue_full": 1}


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
        assert _nonzero(bench.metrics.window_moves)[overflow] == moves
        assert _nonzero(bench.metrics.dropped_context_tokens)[overflow] == unseen


async def test_each_sequence_takes_a_place() -> None:
    bench = Bench(max_live=4)
    bench.admit("1", sequences=3)
    with pytest.raises(errors.QueueFull, match=r"3 of 4 places are taken, and this request needs 2"):
        bench.admit("2", sequences=2)
    bench.admit("3")


async def test_several_sequences_end_one_by_one_and_the_last_ends_the_request() -> None:
    bench = Bench()
    request = bench.start_many(3, stops=("cd",))
    submits = [message for message in bench.engine.sent if isinstance(message, Submit)]
    assert [each.sequence_index for each in submits] == [0, 1, 2]
    assert {each.group for each in submits} == {submits[0].key}
    assert {each.sampling.seed for each in submits} == {7}
    bench.token_of(request, 1, "a", Finished("max_new_tokens"))
    bench.token_of(request, 0, "c")
    bench.token_of(request, 0, "d")
    assert request.end is None
    batch = request.outbox.take()
    assert {index: output.text for index, output in batch.outputs.items()} == {1: "a", 0: ""}
    ends = {index: output.end for index, output in batch.outputs.items()}
    assert [end and end.reason for end in (ends[0], ends[1])] == ["stop_string", "max_new_tokens"]
    assert [batch.outputs[index].token_count for index in (0, 1)] == [2, 1]
    assert bench.engine.aborted == [request.sequences[0].key]
    # What still comes for a sequence that has ended is dropped.
    bench.token_of(request, 0, "e")
    bench.token_of(request, 2, "b", Finished("eos", 2))
    assert request.end is not None
    assert request.end.reason == "eos"
    assert request.output_token_count == 4
    assert bench.finished() == {"eos": 1}
    assert bench.table.waiting_count == bench.table.running_count == 0
    assert bench.sample("pellucid_generated_tokens_total") == 4


@pytest.mark.parametrize("event", ["cancel", "non_finite", "deadline", "broken"])
async def test_what_ends_one_sequence_badly_ends_all(event: str) -> None:
    bench = Bench()
    request = bench.start_many(3)
    bench.token_of(request, 0, "a", Finished("max_new_tokens"))
    if event == "cancel":
        assert bench.table.cancel("many")
    elif event == "broken":
        bench.table.fail(request, errors.InternalError("x"))
    else:
        bench.step(Progress(request.sequences[1].key, None, Finished(event), 0.0, 0))  # type: ignore[arg-type]
    told = {"cancel": [1, 2], "broken": [1, 2]}.get(event, [2])
    assert bench.engine.aborted == [request.sequences[index].key for index in told]
    assert request.unfinished == []
    assert sum(bench.finished().values()) == 1
    reasons = {index: output.end and output.end.reason for index, output in request.outbox.take().outputs.items()}
    if event == "cancel":
        assert reasons == {0: "max_new_tokens", 1: "cancelled", 2: "cancelled"}
    else:
        assert request.end is not None
        assert request.end.error is not None


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


async def test_the_first_message_waits_for_the_prompts_logprobs_and_they_are_asked_for_once() -> None:
    bench = Bench()
    request = bench.start_many(2, EngineOptions(prompt_logprobs=LogprobWish(), output_logprobs=LogprobWish()))
    scored = TokenLogprob(5, -0.5, 1)
    bench.step(Progress(request.sequences[1].key, 5, None, 1.0, 0, scored))
    waiting = asyncio.create_task(request.outbox.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    found = [TokenLogprob(1, None, 0), TokenLogprob(2, -1.0, 1), TokenLogprob(3, -2.0, 4)]
    bench.step(Progress(request.sequences[0].key, 6, None, 1.0, 0, scored, found, cached_tokens=2))
    await asyncio.wait_for(waiting, 1)
    assert request.prompt_logprobs == found
    outputs = request.outbox.take().outputs
    assert [(outputs[index].token_ids, outputs[index].logprobs) for index in (0, 1)] == [
        ([6], [scored]),
        ([5], [scored]),
    ]
    bench.engine.sent.clear()
    bench.table.engine_down()
    bench.table.engine_up()
    assert [message.prompt_logprobs for message in bench.engine.sent if isinstance(message, Submit)] == [None, None]
    # What a new engine tells again is not taken again.
    bench.step(Progress(request.sequences[0].key, 7, None, 2.0, 0, scored, [TokenLogprob(9, None, 0)], cached_tokens=1))
    assert request.prompt_logprobs == found
    assert len(request.outbox.take().outputs[0].logprobs) == 1


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


@pytest.mark.parametrize("kind", get_args(FinishKind))
async def test_every_end_of_the_engine_is_told_and_counted(kind: FinishKind) -> None:
    bench = Bench()
    request = bench.start()
    bench.step(Progress(request.key, None, Finished(kind), 0.0, 0))
    assert request.end is not None
    assert sum(bench.finished().values()) == 1
    if request.end.error is None:
        (output,) = delta(request.outbox.take(), MODEL).outputs
        assert FinishReason.Name(output.finish.reason) == f"FINISH_REASON_{kind.upper()}"
