"""Live requests of several sequences."""

from __future__ import annotations

import pytest

from pellucid_server import errors
from pellucid_server.engine.messages import (
    Finished,
    Progress,
    Submit,
)
from pellucid_testing.live_requests import Bench


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
        bench.step(Progress(request.sequences[1].key, [], Finished(event), 0.0, 0))  # type: ignore[arg-type]
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
