"""What a step brings to live requests: tokens, text, and the ends that come of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import get_args

import pytest

from pellucid.v1.inference_pb2 import FinishReason
from pellucid_server import errors
from pellucid_server.delivery import LOGPROB_BYTES, MAX_MESSAGE_BYTES, TOKEN_BYTES, DeliveryRules, Patience
from pellucid_server.engine.messages import (
    Finished,
    FinishKind,
    LogprobWish,
    Progress,
    Sampling,
    Submit,
    TokenLogprob,
)
from pellucid_server.live_request import EngineOptions, LiveRequest, Plan
from pellucid_server.rpc.messages import delta
from pellucid_server.served import DefaultSampling, ServedModel
from pellucid_server.text.stream import Delta, TextStream
from pellucid_testing.live_requests import TOKENIZER, Bench

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
    bench.step(*(Progress(request.key, [token], ended if token == ids[-1] else None, 1.0, 0) for token in ids[1:]))
    assert request.sequences[0].generated == ids[:4]
    assert request.end is not None
    assert request.end.reason == "stop_string"
    assert bench.engine.aborted == [request.key]
    (output,) = request.outbox.take().outputs.values()
    assert (output.token_ids, output.text, output.token_count) == (ids[:4], "ab", 4)
    name = "pellucid_inter_token_latency_seconds_count"
    assert bench.metrics.registry.get_sample_value(name, {"model_name": "m"}) == 1


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
        (output,) = delta(request.outbox.take(), MODEL).outputs
        assert FinishReason.Name(output.finish.reason) == f"FINISH_REASON_{kind.upper()}"
