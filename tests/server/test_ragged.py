"""A step's tokens laid end to end."""

from __future__ import annotations

import itertools
from array import array

from pellucid_server.engine.ragged import StepRows
from pellucid_server.engine.sequence import Sampled, Step
from pellucid_server.kv.window import ContextWindow
from pellucid_testing.scheduling import Run, submit


def laid_out(step: Step) -> StepRows:
    """Its rows, one by one beside what the chunks say."""
    rows = StepRows.of(step)
    expected = [
        (token, place, index)
        for index, chunk in enumerate(step.chunks)
        for token, place in zip(
            [*chunk.sequence.view(chunk.start, chunk.count), *chunk.draft],
            range(chunk.start, chunk.start + chunk.rows),
            strict=True,
        )
    ]
    assert list(zip(rows.tokens, rows.positions, rows.row_sequence, strict=True)) == expected
    assert rows.positions32 == array("i", rows.positions)
    assert rows.length == 1 + max(rows.positions)
    begins = list(itertools.accumulate((chunk.rows for chunk in step.chunks), initial=0))
    assert list(rows.sampled_rows) == [
        row for chunk, end in zip(step.chunks, begins[1:], strict=True) for row in range(end - chunk.sampled_rows, end)
    ]
    for index, chunk in enumerate(step.chunks):
        table = rows.block_tables[index * rows.table_width : (index + 1) * rows.table_width].tolist()
        assert table == chunk.sequence.blocks + [-1] * (rows.table_width - len(chunk.sequence.blocks))
    return rows


def finish(run: Run, step: Step) -> None:
    """Every sequence says the same token over and over, so that drafts come."""
    run.scheduler.complete(step, [[Sampled(1000)] for chunk in step.chunks if chunk.samples])


def test_prompts_decodes_and_drafts_lie_end_to_end() -> None:
    run = Run.of(100, 4, 4, 16, draft_tokens=3)
    run.scheduler.submit(submit(1, [5, 6, 7, 5, 6, 7, 5, 6], 40))
    run.scheduler.submit(submit(2, 30, 9))
    kinds = set()
    while not run.scheduler.idle:
        step = run.scheduler.schedule(0.0)
        laid_out(step)
        kinds |= {(chunk.count > 1, chunk.samples, bool(chunk.draft)) for chunk in step.chunks}
        finish(run, step)
    assert kinds >= {(True, False, False), (True, True, False), (False, True, False), (False, True, True)}


def test_windows_are_told_once_a_sequence_may_have_grown_beyond_one() -> None:
    run = Run.of(100, 4, 4, 64)
    run.scheduler.submit(submit(2, 5, 90, context=ContextWindow("roll", 3, 8)))
    run.scheduler.submit(submit(4, 2, 90))
    told = {}
    for _ in range(8):
        step = run.scheduler.schedule(0.0)
        rows = laid_out(step)
        told[rows.length] = rows.rolling
        finish(run, step)
    assert [length for length, rolling in told.items() if rolling is None] == [5, 6, 7, 8]
    ninth = told[9]
    assert ninth is not None
    assert (ninth.window.tolist(), ninth.sinks.tolist(), ninth.spans.tolist()) == ([8, 0], [3, 0], [11, 0])
    assert ninth.sink_query_positions.tolist() == [8, 5]


def test_windows_are_told_to_steps_in_a_row_of_which_the_last_one_needs_them() -> None:
    for most, are_told in ((3, False), (4, True)):
        run = Run.of(100, 4, 4, 64)
        run.scheduler.submit(submit(2, 5, 90, context=ContextWindow("roll", 3, 8)))
        run.step()
        step = run.scheduler.schedule(0.0, most)
        assert (step.repeats, laid_out(step).rolling is not None) == (most, are_told)
