"""The outbox: what pends coalesces, and a message is due when the rules say so."""

from __future__ import annotations

import asyncio
import time

from pellucid_server.delivery import DeliveryRules, Outbox, Patience


def is_due(outbox: Outbox) -> bool:
    waiting = outbox.wait()
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


async def test_deltas_coalesce() -> None:
    outbox = Outbox(DeliveryRules())
    assert not is_due(outbox)
    outbox.add(5, "a")
    outbox.add(6, "")
    outbox.add(7, "bc")
    assert is_due(outbox)
    batch = outbox.take()
    assert (batch.token_ids, "".join(batch.texts)) == ([5, 6, 7], "abc")
    assert not is_due(outbox)
    assert outbox.take().token_ids == []


async def test_the_first_token_never_waits_and_later_ones_gather() -> None:
    outbox = Outbox(DeliveryRules(min_tokens=3))
    outbox.add(1, "")
    assert is_due(outbox)
    outbox.take()
    for token in (2, 3):
        outbox.add(token, "x")
        assert not is_due(outbox)
    outbox.add(4, "x")
    assert is_due(outbox)
    outbox.take()
    outbox.add(5, "x")
    assert not is_due(outbox)
    outbox.close()
    assert is_due(outbox)
    assert outbox.take().token_ids == [5]


async def test_final_only_waits_for_the_end() -> None:
    outbox = Outbox(DeliveryRules(final_only=True))
    outbox.add(1, "a")
    assert not is_due(outbox)
    outbox.close()
    assert is_due(outbox)
    assert outbox.take().texts == ["a"]


async def test_what_is_left_out_makes_no_message_after_the_first() -> None:
    outbox = Outbox(DeliveryRules(with_token_ids=False))
    outbox.add(1, "")
    assert is_due(outbox)
    assert outbox.take().token_ids == []
    outbox.add(2, "")
    assert not is_due(outbox)
    outbox.add(3, "é")
    assert is_due(outbox)
    assert outbox.take().texts == ["é"]
    silent = Outbox(DeliveryRules(with_token_ids=False, with_text=False))
    silent.add(1, "a")
    assert is_due(silent)
    silent.take()
    silent.add(2, "b")
    assert not is_due(silent)


async def test_waiting_wakes_up() -> None:
    outbox = Outbox(DeliveryRules())
    waiter = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    outbox.add(1, "")
    await waiter


async def test_a_stall_needs_both_time_and_bytes() -> None:
    outbox = Outbox(DeliveryRules(), Patience(seconds=5.0, bytes=100))
    late = time.monotonic() + 6
    outbox.add(1, "a")
    outbox.take()
    outbox.add(2, "x" * 50)
    assert not outbox.is_stalled(late)
    outbox.add(3, "x" * 50)
    assert outbox.is_stalled(late)
    assert not outbox.is_stalled(time.monotonic())
    outbox.written()
    assert not outbox.is_stalled(late)
