"""How far apart the messages of a stream are: by the number of streams, and by the steps that bring tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid_server.pace import LONGEST_GAP, MESSAGES_PER_SECOND, SHORTEST_GAP, Pace


@given(streams=st.integers(0, 1000), now=st.floats(0, 1e7), later=st.floats(0, 1))
def test_gaps_grow_with_the_streams_and_end_together(streams: int, now: float, later: float) -> None:
    pace = Pace()
    pace.streams = streams
    assert SHORTEST_GAP <= pace.gap <= LONGEST_GAP
    if SHORTEST_GAP < pace.gap < LONGEST_GAP:
        assert streams / pace.gap == pytest.approx(MESSAGES_PER_SECOND)
    rounding = 1e-8
    end = pace.gap_end(now)
    assert -rounding <= end - now <= pace.gap + rounding
    whole_gaps = (pace.gap_end(now + later * pace.gap) - end) / pace.gap
    assert whole_gaps == pytest.approx(round(whole_gaps), abs=1e-4), "another stream's gap ends at another moment"


def test_a_gap_ends_with_the_step_that_is_nearest_to_its_end() -> None:
    pace = Pace()
    for at in (1.0, 1.02, 1.04):
        pace.step(at)
    assert pace.due == pytest.approx(1.05)
    # A step that takes longer, beside a prompt for instance, says nothing about the next one; two of them do.
    pace.step(1.12)
    assert pace.due == pytest.approx(1.13)
    pace.step(1.22)
    assert pace.due == pytest.approx(1.26)
    # Steps that are told together are no reason to expect the next ones at once.
    pace.step(1.22)
    assert pace.due == pytest.approx(1.22 + SHORTEST_GAP / 2)


@given(step=st.floats(0.0005, 0.02), lag=st.floats(0, 0.0005))
def test_one_message_goes_in_each_gap_however_long_steps_take(step: float, lag: float) -> None:
    """One that goes a little before the common moment, with the nearest step, is not followed by another."""
    pace = Pace()
    pace.streams = 16
    began = at = 100.0
    gap_end, messages = 0.0, 0
    while at < began + 1:
        at += step
        pace.step(at)
        if pace.due >= gap_end:
            messages += 1
            gap_end = pace.gap_end(at + lag)
    expected = 1 / max(pace.gap, step)
    assert expected - 2 <= messages <= expected + 2
