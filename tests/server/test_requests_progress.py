"""What a step brings to live requests: tokens, text, and the ends that come of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import get_args

import pytest

from pellucid.v1.inference_pb2 import FinishReason, GenerateResponse
from pellucid_server import errors
from pellucid_server.delivery import LOGPROB_BYTES, MAX_MESSAGE_BYTES, TOKEN_BYTES, DeliveryRules, Patience
from pellucid_server.engine.messages import (
    Finished,
    FinishKind,
    LogprobWish,
    Progress,
    Sampling,
    StepDone,
    Submit,
    TokenLogprob,
)
from pellucid_server.live_request import EngineOptions, LiveRequest, Plan
from pellucid_server.rpc.messages import fill_outputs
from pellucid_server.served import DefaultSampling, ServedModel
from pellucid_server.text.stream import Delta, TextStream
from pellucid_testing.live_requests import TOKENIZER, Bench
from pellucid_testing.stats import stats

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
    stop_ids=None,
    sampling=DefaultSampling(),
    default_max_new_tokens=16,
    max_new_tokens_limit=64,
    overflow="reject",
)


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
            bench.step(Progress(request.key, [2], Finished("eos", 2), 0.0, 0))
        else:
            bench.token(request, "b", Finished("max_new_tokens"))
        assert request.outbox.take().outputs[0].text == "ab"


async def test_errors_of_the_engine_become_errors_of_the_call() -> None:
    bench = Bench()
    request = bench.start("x1")
    bench.step(Progress(request.key, [], Finished("non_finite"), 0.0, 0))
    assert request.end is not None
    assert isinstance(request.end.error, errors.NonFiniteLogits)
    assert "'x1'" in request.end.error.message
    late = bench.start("x2")
    bench.step(Progress(late.key, [], Finished("deadline"), None, 0))
    assert late.end is not None
    assert isinstance(late.end.error, errors.DeadlineExceeded)
    assert bench.finished() == {"non_finite_logits": 1, "deadline": 1}
    assert bench.sample("pellucid_non_finite_logits_total") == 1


async def test_a_reader_that_does_not_read_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("pellucid_server.progress.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("pellucid_server.delivery.time", SimpleNamespace(monotonic=lambda: now))
    bench = Bench(patience=Patience(seconds=2, bytes=40))
    slow, fast = bench.start("slow"), bench.start("fast")
    bench.token(slow, "a")
    writer = asyncio.create_task(take_and_never_write(slow))
    await asyncio.sleep(0)
    for _ in range(9):
        bench.token(slow, "a")
        bench.token(fast, "a")
    assert slow.end is None
    now += 3
    bench.token(slow, "a")
    bench.token(fast, "a")
    assert isinstance(slow.end and slow.end.error, errors.SlowConsumer)
    assert bench.engine.aborted == [slow.key]
    assert fast.end is None
    assert bench.finished() == {"slow_consumer": 1}
    with pytest.raises(asyncio.CancelledError):
        await writer


async def take_and_never_write(request: LiveRequest) -> None:
    request.outbox.take()
    await asyncio.Event().wait()


async def test_an_output_beyond_one_message_ends_a_request_that_wants_it_in_one() -> None:
    """The answer grows for as long as the request may run, and cannot be sent in the end."""
    bench = Bench()
    request = bench.table.admit("r", DeliveryRules(final_only=True), deadline=None, time_limit=None)
    plan = Plan([1, 2, 3], 3, 0, Sampling(0.0, 0, 1.0, 0.0, 7), 10_000, 0, [2], [], 20_000)
    bench.table.start(request, plan, lambda: None)
    entry = TokenLogprob(5, -1.0, 1, ((1, -1.0, 1),) * 9999)
    steps = 0
    while request.end is None and steps < 1000:
        bench.step(Progress(request.key, [5], None, time.monotonic(), 0, logprobs=[entry]))
        steps += 1
    assert steps == 4 * MAX_MESSAGE_BYTES // (10_000 * LOGPROB_BYTES + TOKEN_BYTES) + 1
    assert isinstance(request.end and request.end.error, errors.RequestTooLarge)
    assert bench.engine.aborted == [request.key]
    assert bench.finished() == {"request_too_large": 1}


async def test_a_request_whose_text_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TextStream):
        def push(self, token_ids: Sequence[int]) -> Delta:
            raise KeyError("a character without a name")

    bench = Bench()
    broken, sound = bench.admit("broken"), bench.start("sound")
    plan = sound.plan
    assert plan is not None
    bench.table.start(broken, plan, lambda: Broken(TOKENIZER))
    progress = [Progress(request.key, [5], None, 0.0, 0) for request in (broken, sound)]
    bench.step(*progress, running=2)
    assert isinstance(broken.end and broken.end.error, errors.InternalError)
    assert "character" not in str(broken.end)
    assert bench.engine.aborted == [broken.key]
    assert sound.end is None
    assert len(sound.sequences[0].generated) == 1
    assert bench.finished() == {"engine_error": 1}


async def test_a_step_may_bring_several_tokens() -> None:
    """Drafts that came true: the tokens of a step have no gap between them, and none counts behind a stop string."""
    bench = Bench()
    request = bench.start(stops=("cd",))
    ids = TOKENIZER.encode("abcde", add_special_tokens=False)
    bench.step(Progress(request.key, [ids[0]], None, 1.0, 0))
    ended = Finished("max_new_tokens")
    bench.step(Progress(request.key, ids[1:], ended, 1.0, 0))
    assert request.sequences[0].generated == ids[:4]
    assert request.end is not None
    assert request.end.reason == "stop_string"
    assert bench.engine.aborted == [], "the engine has ended it"
    (output,) = request.outbox.take().outputs.values()
    assert (output.token_ids, output.text, output.token_count) == (ids[:4], "ab", 4)
    assert bench.sample("pellucid_inter_token_latency_seconds_count") == 1


# ---- Reports of several steps ----


def report(bench: Bench, at: Sequence[float], *progress: Progress) -> None:
    """What steps in a row brought that ended `at` these moments."""
    snapshot = stats(running=1, step_sequences=len(progress), step_tokens=1, step_phase="decode")
    bench.table.engine_step(StepDone(list(progress), snapshot, list(at)))


def gaps(bench: Bench) -> tuple[float | None, float | None]:
    """Count and sum of the gaps between tokens."""
    name = "pellucid_inter_token_latency_seconds"
    return bench.sample(f"{name}_count"), bench.sample(f"{name}_sum")


def ids_of(letters: str) -> list[int]:
    return TOKENIZER.encode(letters, add_special_tokens=False)


def scored(ids: Sequence[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token, -0.5, place) for place, token in enumerate(ids, start=1)]


async def test_each_step_of_a_report_has_its_own_moment() -> None:
    bench = Bench()
    request, other = bench.start(), bench.start("other")
    begin = request.admitted_at
    report(bench, [begin + 2.0], Progress(request.key, ids_of("a"), None, begin + 1.0, 0))
    times = [begin + 2.5, begin + 3.5, begin + 5.5]
    report(bench, times, *(Progress(one.key, ids_of("bcd"), None, begin + 1.0, 0) for one in (request, other)))
    (count, total), sequence = gaps(bench), request.sequences[0]
    assert count == 3 + 2, "the first token of the other one follows nothing"
    assert total == pytest.approx(3.5 + 3.0)
    assert bench.sample("pellucid_time_to_first_token_seconds_count") == 2
    late = other.admitted_at - begin
    assert bench.sample("pellucid_time_to_first_token_seconds_sum") == pytest.approx(2.0 + 2.5 - late)
    assert (sequence.first_token_at, sequence.last_token_at) == (begin + 2.0, begin + 5.5)
    assert (other.first_token_at, other.last_token_at) == (times[0], times[-1])
    assert bench.metrics.generated_token_count == 7
    ended = Finished("max_new_tokens")
    report(bench, [begin + 6.5, begin + 7.0], Progress(request.key, ids_of("ef"), ended, begin + 1.0, 0))
    assert request.end is not None
    assert request.end.at == begin + 7.0
    output = request.outbox.take().outputs[0]
    assert (output.token_ids, output.text, output.token_count) == (ids_of("abcdef"), "abcdef", 6)
    assert bench.sample("pellucid_request_time_per_output_token_seconds_sum") == pytest.approx(5.0 / 5)
    assert bench.sample("pellucid_request_decode_time_seconds_sum") == pytest.approx(5.0)


@pytest.mark.parametrize("finished", [None, Finished("max_new_tokens"), Finished("eos", 2), Finished("non_finite")])
async def test_a_stop_string_in_the_middle_of_a_report_drops_what_follows(finished: Finished | None) -> None:
    bench = Bench()
    request = bench.start(stops=("cd",))
    begin, letters = request.admitted_at, ids_of("abcdef")
    report(bench, [begin + 1.0], Progress(request.key, letters[:1], None, begin, 0, scored(letters[:1])))
    tokens = letters[1:] + ([2] if finished and finished.kind == "eos" else [])
    moments = [begin + 2.0, begin + 4.0, begin + 8.0, begin + 16.0, begin + 32.0, begin + 64.0]
    steps = len(tokens) + (finished is not None and finished.kind == "non_finite")
    report(bench, moments[:steps], Progress(request.key, tokens, finished, begin, 0, scored(tokens)))
    assert request.end is not None
    assert (request.end.reason, request.end.matched_stop_string, request.end.at) == ("stop_string", "cd", begin + 8.0)
    assert request.end.error is None
    assert request.sequences[0].generated == letters[:4]
    assert bench.engine.aborted == ([request.key] if finished is None else [])
    assert bench.finished() == {"stop_string": 1}
    assert bench.sample("pellucid_non_finite_logits_total") == 0
    output = request.outbox.take().outputs[0]
    assert (output.token_ids, output.text, output.token_count) == (letters[:4], "ab", 4)
    assert [each.token_id for each in output.logprobs] == letters[:4]
    count, total = gaps(bench)
    assert count == 3
    assert total == pytest.approx(7.0)
    assert bench.metrics.generated_token_count == 4


async def test_the_end_of_a_report_is_that_of_its_last_step() -> None:
    """A token that ends the output has no text; a step without a token has no gap."""
    bench = Bench()
    spoken, broken = bench.start("spoken", stops=("abcx",)), bench.start("broken")
    begin = spoken.admitted_at
    for request in (spoken, broken):
        report(bench, [begin + 1.0], Progress(request.key, ids_of("a"), None, begin, 0))
    report(
        bench,
        [begin + 2.0, begin + 4.0, begin + 8.0],
        Progress(spoken.key, ids_of("bcz"), Finished("stop_token", ids_of("z")[0]), begin, 0),
        Progress(broken.key, ids_of("bc"), Finished("non_finite"), begin, 0),
    )
    assert spoken.end is not None
    assert (spoken.end.reason, spoken.end.at) == ("stop_token", begin + 8.0)
    assert [spoken.end.matched_token_id] == ids_of("z")
    output = spoken.outbox.take().outputs[0]
    assert (output.token_ids, output.text) == (ids_of("abcz"), "abc")
    assert isinstance(broken.end and broken.end.error, errors.NonFiniteLogits)
    assert broken.last_token_at == begin + 4.0
    count, total = gaps(bench)
    assert count == 3 + 2
    assert total == pytest.approx(7.0 + 3.0)


async def test_tokens_of_one_moment_have_no_gap_between_them() -> None:
    """A draft that came true: one step, several tokens."""
    bench = Bench()
    request = bench.start()
    begin = request.admitted_at
    report(bench, [begin + 1.0], Progress(request.key, ids_of("a"), None, begin, 0))
    report(bench, [begin + 3.0], Progress(request.key, ids_of("bcd"), None, begin, 0))
    report(bench, [begin + 4.0], Progress(request.key, ids_of("ef"), None, begin, 0))
    count, total = gaps(bench)
    assert count == 2
    assert total == pytest.approx(3.0)
    assert bench.metrics.generated_token_count == 6
    assert request.last_token_at == begin + 4.0


async def test_the_first_message_waits_for_the_prompts_logprobs_and_they_are_asked_for_once() -> None:
    bench = Bench()
    request = bench.start_many(2, EngineOptions(prompt_logprobs=LogprobWish(), output_logprobs=LogprobWish()))
    scored = TokenLogprob(5, -0.5, 1)
    bench.step(Progress(request.sequences[1].key, [5], None, 1.0, 0, [scored]))
    waiting = asyncio.create_task(request.outbox.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    found = [TokenLogprob(1, None, 0), TokenLogprob(2, -1.0, 1), TokenLogprob(3, -2.0, 4)]
    bench.step(Progress(request.sequences[0].key, [6], None, 1.0, 0, [scored], found, cached_tokens=2))
    await asyncio.wait_for(waiting, 30)
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
    bench.step(
        Progress(request.sequences[0].key, [7], None, 2.0, 0, [scored], [TokenLogprob(9, None, 0)], cached_tokens=1)
    )
    assert request.prompt_logprobs == found
    assert len(request.outbox.take().outputs[0].logprobs) == 1


@pytest.mark.parametrize("kind", get_args(FinishKind))
async def test_every_end_of_the_engine_is_told_and_counted(kind: FinishKind) -> None:
    bench = Bench()
    request = bench.start()
    bench.step(Progress(request.key, [], Finished(kind), 0.0, 0))
    assert request.end is not None
    assert sum(bench.finished().values()) == 1
    if request.end.error is None:
        response = GenerateResponse()
        fill_outputs(response, request.outbox.take(), MODEL)
        (output,) = response.outputs
        assert FinishReason.Name(output.finish.reason) == f"FINISH_REASON_{kind.upper()}"
