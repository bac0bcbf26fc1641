"""Messages come out whole and in order, however the bytes between the processes are cut."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid_server.engine.framing import LENGTH, Frames, frame
from pellucid_server.engine.messages import Abort, Ping, Progress, StepDone, decode_from_engine, decode_to_engine
from pellucid_testing.stats import stats


@given(keys=st.lists(st.integers(0, 2**40), max_size=8), cuts=st.lists(st.integers(1, 40), min_size=1))
def test_any_cut_gives_the_same_messages(keys: list[int], cuts: list[int]) -> None:
    sent = [Abort(key) if key % 3 else Ping() for key in keys]
    raw = b"".join(map(frame, sent))
    frames = Frames(decode_to_engine)
    received, position = [], 0
    while position < len(raw):
        size = cuts[position % len(cuts)]
        received += frames.push(memoryview(raw)[position : position + size])
        position += size
    assert received == sent
    assert frames.push(frame(Ping())) == [Ping()]


def test_a_message_is_told_once_it_is_whole_and_not_before() -> None:
    step = StepDone([Progress(7, [3], None, None, 0)] * 10_000, stats(), [1.5])
    raw = frame(step)
    frames = Frames(decode_from_engine)
    assert frames.push(raw[:-1]) == []
    assert frames.push(raw[-1:] + raw + raw[:2]) == [step, step]
    assert frames.push(raw[2:]) == [step]


def test_what_is_no_message_is_an_error() -> None:
    with pytest.raises(msgspec.MsgspecError):
        Frames(decode_from_engine).push(LENGTH.pack(3) + b"\xc1\xc1\xc1")
