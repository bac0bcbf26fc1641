"""The outbox: what pends coalesces, and a message is due when the rules say so."""

from __future__ import annotations

import asyncio
import time

from pellucid_server.delivery import (
    FULL_BYTES,
    LOGPROB_BYTES,
    MAX_MESSAGE_BYTES,
    TOKEN_BYTES,
    Batch,
    DeliveryRules,
    Outbox,
    Patience,
)
from pellucid_server.ends import End
from pellucid_server.engine.messages import TokenLogprob
from pellucid_server.pace import Pace


class Every(Pace):
    """Gaps of so many seconds."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self._gap = gap

    @property
    def gap(self) -> float:
        return self._gap


def paced(gap: float) -> Outbox:
    return Outbox(DeliveryRules(paced=True), pace=Every(gap))


def is_due(outbox: Outbox) -> bool:
    waiting = outbox.wait()
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


def token_ids(batch: Batch) -> list[int]:
    return [token for output in batch.outputs.values() for token in output.token_ids]


def texts(batch: Batch) -> list[str]:
    return [text for output in batch.outputs.values() for text in output.texts]


async def test_deltas_coalesce() -> None:
    outbox = Outbox(DeliveryRules())
    assert not is_due(outbox)
    outbox.add([5], "a")
    outbox.add([6], "")
    outbox.add([7], "bc")
    assert is_due(outbox)
    batch = outbox.take()
    assert (batch.outputs[0].token_ids, batch.outputs[0].text) == ([5, 6, 7], "abc")
    assert not is_due(outbox)
    assert token_ids(outbox.take()) == []


async def test_the_first_token_never_waits_and_later_ones_gather() -> None:
    outbox = Outbox(DeliveryRules(min_tokens=3))
    outbox.add([1], "")
    assert is_due(outbox)
    outbox.take()
    for token in (2, 3):
        outbox.add([token], "x")
        assert not is_due(outbox)
    outbox.add([4], "x")
    assert is_due(outbox)
    outbox.take()
    outbox.add([5], "x")
    assert not is_due(outbox)
    outbox.close()
    assert is_due(outbox)
    assert token_ids(outbox.take()) == [5]


async def test_a_writer_wakes_once_a_message_is_due_and_not_before() -> None:
    outbox = Outbox(DeliveryRules(min_tokens=2))
    outbox.add([1], "")
    outbox.take()
    waiting = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    outbox.add([2], "x")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    outbox.add([3], "x")
    outbox.add([4], "x")
    await waiting
    assert token_ids(outbox.take()) == [2, 3, 4]
    waiting = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    outbox.close()
    await waiting


async def test_tokens_wait_while_the_gap_lasts() -> None:
    outbox = paced(1e9)
    outbox.add([1], "a")
    outbox.take()
    outbox.add([2], "b")
    waiting = asyncio.create_task(outbox.wait())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_tokens_gather_until_the_gap_is_over() -> None:
    outbox = paced(0.01)
    outbox.add([1], "a")
    assert is_due(outbox)
    outbox.take()
    outbox.add([2], "b")
    waiting = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    outbox.add([3], "c")
    await waiting
    assert token_ids(outbox.take()) == [2, 3]
    # Where nothing comes while the gap lasts, the next token does not wait.
    await asyncio.sleep(0.03)
    outbox.add([4], "d")
    assert is_due(outbox)


async def test_a_gap_ends_with_the_step_that_is_nearest_to_its_end() -> None:
    pace = Every(1e9)
    outbox = Outbox(DeliveryRules(paced=True), pace=pace)
    outbox.add([1], "a")
    outbox.take()
    waiting = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    outbox.add([2], "b")
    pace.step(1.2e9)
    outbox.add([3], "c")
    await waiting
    assert token_ids(outbox.take()) == [2, 3]


async def test_streams_count_from_their_first_message_to_their_end() -> None:
    pace = Pace()
    outboxes = [Outbox(DeliveryRules(paced=is_paced), pace=pace) for is_paced in (True, True, False)]
    for outbox in outboxes:
        outbox.add([1], "a")
        assert pace.streams == 0
    for outbox in outboxes:
        outbox.take()
    outboxes[0].take()
    assert pace.streams == 2
    for outbox in outboxes:
        outbox.close()
        outbox.close()
        outbox.take()
    late = Outbox(DeliveryRules(paced=True), pace=pace)
    late.close()
    late.take()
    assert pace.streams == 0


def test_callers_who_want_each_token_as_it_comes_are_eager() -> None:
    patient = (DeliveryRules(min_tokens=8), DeliveryRules(paced=True), DeliveryRules(final_only=True))
    assert Outbox(DeliveryRules()).is_eager
    assert not any(Outbox(rules).is_eager for rules in patient)


async def test_ends_and_full_messages_wait_for_no_gap() -> None:
    entry = TokenLogprob(1, -1.0, 1, ((1, -1.0, 1),) * 999)

    def end(outbox: Outbox) -> None:
        outbox.end(0, End("eos", 0.0), 2)

    def fill(outbox: Outbox) -> None:
        for _ in range(-(-FULL_BYTES // (1000 * LOGPROB_BYTES))):
            outbox.add([3], "", logprobs=[entry])

    for hurry in (end, fill, Outbox.close):
        outbox = paced(1e9)
        outbox.add([1], "a")
        outbox.take()
        waiting = asyncio.create_task(outbox.wait())
        await asyncio.sleep(0)
        outbox.add([2], "b")
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        hurry(outbox)
        await waiting
        assert token_ids(outbox.take())[0] == 2


async def test_final_only_waits_for_the_end() -> None:
    outbox = Outbox(DeliveryRules(final_only=True))
    outbox.add([1], "a")
    assert not is_due(outbox)
    outbox.close()
    assert is_due(outbox)
    assert texts(outbox.take()) == ["a"]


async def test_what_a_message_cannot_hold_goes_into_several() -> None:
    """A reader that stops for a while gets all that has gathered in one message, which is too large to be sent."""
    outbox = Outbox(DeliveryRules(min_tokens=200), Patience(seconds=500, bytes=2 * FULL_BYTES))
    entry = TokenLogprob(1, -1.0, 1, ((1, -1.0, 1),) * 999)
    to_full = -(-FULL_BYTES // (1000 * LOGPROB_BYTES + TOKEN_BYTES))
    outbox.add([0], "")
    outbox.take()
    for place in range(1, 2 * to_full + 2):
        outbox.add([place], "", index=place % 2, logprobs=[entry])
    outbox.add((), "rest", index=0)
    outbox.end(0, End("eos", 0.0), to_full)
    assert not outbox.is_stalled(time.monotonic() + 400)
    assert outbox.is_stalled(time.monotonic() + 600)
    seen: list[int] = []
    for count, more in ((to_full, True), (to_full, True), (1, False)):
        assert is_due(outbox)
        batch = outbox.take()
        assert (batch.token_count, batch.has_end, outbox.has_more) == (count, not more, more)
        assert batch.byte_count <= FULL_BYTES + 1000 * LOGPROB_BYTES + TOKEN_BYTES
        seen += token_ids(batch)
    assert sorted(seen) == list(range(1, 2 * to_full + 2))
    assert not is_due(outbox)
    assert texts(batch) == ["rest"]


async def test_what_must_go_in_one_message_and_cannot_is_told_before_the_end() -> None:
    """An answer that is to come in one message grows without a bound, and cannot be sent in the end."""
    entry = TokenLogprob(1, -1.0, 1, ((1, -1.0, 1),) * 999)
    adds = 4 * MAX_MESSAGE_BYTES // (1000 * LOGPROB_BYTES + TOKEN_BYTES)
    final, incremental = Outbox(DeliveryRules(final_only=True)), Outbox(DeliveryRules())
    for outbox in (final, incremental):
        for _ in range(adds):
            outbox.add([1], "", logprobs=[entry])
        assert not outbox.is_overfull
        outbox.add([1], "", logprobs=[entry])
    assert final.is_overfull
    assert not incremental.is_overfull


async def test_what_is_left_out_makes_no_message_after_the_first() -> None:
    outbox = Outbox(DeliveryRules(with_token_ids=False))
    outbox.add([1], "")
    assert is_due(outbox)
    assert token_ids(outbox.take()) == []
    outbox.add([2], "")
    assert not is_due(outbox)
    outbox.add([3], "é")
    assert is_due(outbox)
    assert texts(outbox.take()) == ["é"]
    silent = Outbox(DeliveryRules(with_token_ids=False, with_text=False))
    silent.add([1], "a")
    assert is_due(silent)
    silent.take()
    silent.add([2], "b")
    assert not is_due(silent)


async def test_waiting_wakes_up() -> None:
    outbox = Outbox(DeliveryRules())
    waiter = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    outbox.add([1], "")
    await waiter


async def test_a_stall_needs_both_time_and_bytes() -> None:
    outbox = Outbox(DeliveryRules(), Patience(seconds=500.0, bytes=100))
    late = time.monotonic() + 600
    outbox.add([1], "a")
    outbox.take()
    outbox.add([2], "x" * 50)
    assert not outbox.is_stalled(late)
    outbox.add([3], "x" * 50)
    assert outbox.is_stalled(late)
    assert not outbox.is_stalled(time.monotonic())
    outbox.written()
    assert not outbox.is_stalled(late)


async def test_sequences_are_kept_apart_and_an_end_never_waits() -> None:
    outbox = Outbox(DeliveryRules(min_tokens=100))
    outbox.add([1], "a", index=1)
    assert is_due(outbox)
    outbox.take()
    outbox.add([2], "b", index=0)
    outbox.add([3], "c", index=1)
    assert not is_due(outbox)
    end = End("eos", 1.0)
    outbox.end(1, end, 2)
    assert is_due(outbox)
    outputs = outbox.take().outputs
    assert (outputs[0].text, outputs[0].end) == ("b", None)
    assert (outputs[1].text, outputs[1].end, outputs[1].token_count) == ("c", end, 2)
    whole = Outbox(DeliveryRules(final_only=True))
    whole.end(0, end, 0)
    assert not is_due(whole)


async def test_nothing_goes_while_the_first_message_is_held() -> None:
    outbox = Outbox(DeliveryRules())
    outbox.hold()
    outbox.add([1], "a")
    outbox.end(1, End("eos", 1.0), 0)
    assert not is_due(outbox)
    outbox.release()
    assert is_due(outbox)
    held = Outbox(DeliveryRules())
    held.hold()
    held.close()
    assert is_due(held)


async def test_logprobs_are_content_and_count_for_a_slow_reader() -> None:
    scored = TokenLogprob(1, -0.5, 1, ((1, -0.5, 1), (2, -0.75, 2)))
    outbox = Outbox(DeliveryRules(with_token_ids=False, with_text=False), Patience(seconds=500.0, bytes=200))
    late = time.monotonic() + 600
    outbox.add([1], "a", logprobs=[scored])
    outbox.take()
    outbox.add([1], "a", logprobs=[scored])
    outbox.add([1], "a", logprobs=[scored])
    assert is_due(outbox)
    assert not outbox.is_stalled(late)
    outbox.add([1], "a", logprobs=[scored])
    assert outbox.is_stalled(late)
    assert outbox.take().outputs[0].logprobs == [scored] * 3
