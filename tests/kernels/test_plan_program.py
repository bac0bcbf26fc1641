"""Where a program's buffers lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pellucid_model.kernels.plan import Program
from pellucid_model.kernels.plan.program import Copy, Operand, writes


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_buffers_that_live_together_lie_apart(buffers: list[tuple[int, int, int]]) -> None:
    program = Program()
    lives = []
    for width, a, b in buffers:
        lives.append((min(a, b), max(a, b), program.new_buffer(width, "tokens")))
    for moment in range(10):
        for first, last, buffer in lives:
            if moment in (first, last):
                operand = Operand(buffer, 0, program.widths[buffer])
                program.instructions.append(Copy(operand, operand))
    places, arenas = program.places()
    spans = []
    for _, _, buffer in lives:
        when = [index for index, each in enumerate(program.instructions) if writes(each)[0].buffer == buffer]
        spans.append((when[0], when[-1], buffer))
    for first, last, buffer in spans:
        assert places[buffer] % 16 == 0
        assert places[buffer] + program.widths[buffer] <= arenas["tokens"]
        for first2, last2, other in spans:
            if other != buffer and first <= last2 and first2 <= last:
                begin, end = places[buffer], places[buffer] + program.widths[buffer]
                assert end <= places[other] or places[other] + program.widths[other] <= begin
