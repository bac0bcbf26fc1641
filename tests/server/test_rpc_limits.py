"""Bounds, cancellation, deadlines and slow readers, with an engine whose pace is known."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pellucid.v1 import inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_testing.calls import collect, cut_off, failure, generate, request
from pellucid_testing.scripted_engine import FIRST_TOKEN, PERIOD, Script
from pellucid_testing.server import ServerProcess, serve

MAX_RUNNING, MAX_QUEUE = 2, 4
PLACES = MAX_RUNNING + MAX_QUEUE
STEP_SECONDS = 0.01
LONG = {"max_new_tokens": 20}
ENDLESS = {"max_new_tokens": 10_000}
"""More than a minute's."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "config.json").write_text(json.dumps({}))
    CharacterTokenizer.train(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"]).save(folder)
    size: dict[str, Any] = {"context_length": 20_000, "kv_block_count": 5000}
    script = Script(lives=str(folder / "lives"), step_seconds=STEP_SECONDS, **size)
    arguments = ("--max-running", str(MAX_RUNNING), "--max-queue", str(MAX_QUEUE))
    with serve(folder, *arguments, program=script.program()) as running:
        yield running


@pytest.fixture
def service(server: ServerProcess) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    yield inference_pb2_grpc.InferenceServiceStub(server.channel())
    server.wait_for_metric("pellucid_requests_running", 0)
    server.wait_for_metric("pellucid_requests_waiting", 0)


def test_the_queue_is_bounded_and_answers_at_once(
    server: ServerProcess, service: inference_pb2_grpc.InferenceServiceStub
) -> None:
    before = server.metric("pellucid_request_rejections_total", reason="queue_full")
    with server.engine_stopped():  # it is not asked
        calls = [service.Generate(request(stopping=LONG), timeout=60) for _ in range(PLACES)]
        server.wait_for_metric("pellucid_requests_waiting", PLACES)
        refusals = [failure(service.Generate(request(stopping=LONG), timeout=20)) for _ in range(44)]
        health: Any = health_pb2_grpc.HealthStub(server.channel())
        status = health.Check(health_pb2.HealthCheckRequest(), timeout=20).status
    assert status == health_pb2.HealthCheckResponse.SERVING
    assert {(found.code, found.reason) for found in refusals} == {("RESOURCE_EXHAUSTED", "QUEUE_FULL")}
    assert refusals[0].retry_after == 0.5
    assert refusals[0].trailers["grpc-retry-pushback-ms"] == "500"
    assert [len(collect(call).token_ids) for call in calls] == [20] * PLACES
    assert server.metric("pellucid_request_rejections_total", reason="queue_full") == before + 44


def test_two_hundred_streams_on_one_channel_all_get_an_answer(server: ServerProcess) -> None:
    channel = server.channel()
    service = inference_pb2_grpc.InferenceServiceStub(channel)
    before = server.metric("pellucid_request_rejections_total", reason="queue_full")
    with server.engine_stopped():
        calls = [service.Generate(request(stopping=LONG), timeout=60) for _ in range(200)]
        refused = before + 200 - PLACES
        server.wait_for_metric("pellucid_request_rejections_total", refused, reason="queue_full")
        health: Any = health_pb2_grpc.HealthStub(channel)
        status = health.Check(health_pb2.HealthCheckRequest(), timeout=20).status
    assert status == health_pb2.HealthCheckResponse.SERVING
    codes = []
    for call in calls:
        try:
            codes.append("OK" if list(call) else "")
        except grpc.RpcError as error:
            codes.append(error.code().name)
    assert codes.count("OK") == PLACES
    assert codes.count("RESOURCE_EXHAUSTED") == 200 - PLACES
    assert generate(channel, stopping={"max_new_tokens": 1}).reason == "max_new_tokens"


def test_ids_in_flight_are_unique(server: ServerProcess, service: inference_pb2_grpc.InferenceServiceStub) -> None:
    with server.engine_stopped():
        first = service.Generate(request(request_id="same", stopping=LONG), timeout=60)
        server.wait_for_metric("pellucid_requests_waiting", 1)
        second = failure(service.Generate(request("other", request_id="same"), timeout=20))
    assert (second.code, second.reason) == ("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
    assert len(collect(first).token_ids) == 20
    again = service.Generate(request(request_id="same", stopping={"max_new_tokens": 1}), timeout=20)
    assert collect(again).prompt.request_id == "same"


def test_the_cancel_call_ends_the_stream_ok(
    server: ServerProcess, service: inference_pb2_grpc.InferenceServiceStub
) -> None:
    call = service.Generate(request(request_id="c", stopping=ENDLESS), timeout=60)
    first = next(call)
    cancel = inference_pb2.CancelRequest(request_id="c")
    assert service.Cancel(cancel).result == inference_pb2.CANCEL_RESULT_CANCELLED
    answer = collect([first, *call])
    assert answer.reason == "cancelled"
    assert 1 <= len(answer.token_ids) == answer.usage.output_token_count < 10_000
    assert service.Cancel(cancel).result == inference_pb2.CANCEL_RESULT_NOT_FOUND
    with pytest.raises(grpc.RpcError) as caught:
        service.Cancel(inference_pb2.CancelRequest())
    assert failure(caught.value).violations.keys() == {"request_id"}


def test_clients_that_go_away_free_their_places(server: ServerProcess) -> None:
    before = server.metric("pellucid_requests_finished_total", reason="client_cancelled")
    for index in range(30):
        channel = server.channel()
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request(stopping=ENDLESS), timeout=60)
        if index % 3:
            next(call)
        if index % 2:
            channel.close()
        else:
            call.cancel()
        server.wait_for_metric("pellucid_requests_running", 0)
        server.wait_for_metric("pellucid_requests_waiting", 0)
    cancelled = server.metric("pellucid_requests_finished_total", reason="client_cancelled") - before
    # A call cancelled before its bytes left the client never reached the server.
    assert 20 <= cancelled <= 30
    assert server.metric("pellucid_request_cancellations_total", cause="client") >= cancelled


def test_deadlines(server: ServerProcess, service: inference_pb2_grpc.InferenceServiceStub) -> None:
    before = server.metric("pellucid_requests_finished_total", reason="deadline")
    cut_off(lambda seconds: service.Generate(request(stopping=ENDLESS), timeout=seconds))
    server.wait_for_metric("pellucid_requests_running", 0)
    server.wait_for_metric("pellucid_requests_waiting", 0)
    assert server.metric("pellucid_requests_finished_total", reason="deadline") > before
    made = server.metric("pellucid_generated_tokens_total")
    time.sleep(0.1)
    assert server.metric("pellucid_generated_tokens_total") == made


def test_time_limits_end_ok(service: inference_pb2_grpc.InferenceServiceStub) -> None:
    answer = collect(service.Generate(request(stopping={**ENDLESS, "time_limit": {"nanos": 200_000_000}}), timeout=60))
    seconds = answer.timings.total_time.ToTimedelta().total_seconds()
    assert answer.reason == "time_limit"
    assert 0.2 <= seconds < 20
    assert len(answer.token_ids) <= seconds / STEP_SECONDS + 1


def test_a_reader_that_lags_gets_fewer_larger_messages_and_holds_up_nobody(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    script = Script(lives=str(tmp_path / "lives"), context_length=100_000, kv_block_count=25_000)
    count = 12_000
    with serve(tmp_path, program=script.program()) as server:
        # A small, fixed window, so that little is on its way to the reader.
        channel = server.channel([("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)])
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        slow = stub.Generate(request([5], stopping={"max_new_tokens": count}), timeout=60)
        first = next(slow)
        fast = generate(server.channel(), [5], stopping={"max_new_tokens": 500})
        assert len(fast.token_ids) == 500
        # The engine is done long before the reader is, who has read one message.
        server.wait_for_metric("pellucid_requests_running", 0)
        answer = collect([first, *slow])
    assert answer.token_ids == [FIRST_TOKEN + i % PERIOD for i in range(count)]
    assert len(answer.messages) < count / 2
    assert max(len(message.outputs[0].token_ids) for message in answer.messages) > 1000


def test_a_reader_that_stops_is_given_up_and_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    script = Script(lives=str(tmp_path / "lives"), context_length=2_000_000, kv_block_count=500_000, step_seconds=0.001)
    limits = ("--max-new-tokens-limit", "1000000", "--slow-reader-seconds", "0.3", "--slow-reader-bytes", "1KiB")
    with serve(tmp_path, *limits, program=script.program()) as server:
        memory = "process_resident_memory_bytes"

        def crowd() -> None:
            """Eight streams side by side that are read as they come."""
            stub = inference_pb2_grpc.InferenceServiceStub(server.channel())
            calls = [stub.Generate(request([5], stopping={"max_new_tokens": 400}), timeout=60) for _ in range(8)]
            assert [len(collect(call).token_ids) for call in calls] == [400] * 8

        crowd()
        before = server.metric(memory)
        # A small, fixed window, so that little is on its way to the readers, who read one message and stop.
        narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        stubs = [inference_pb2_grpc.InferenceServiceStub(server.channel(narrow)) for _ in range(4)]
        slow = [stub.Generate(request([5], stopping={"max_new_tokens": 900_000}), timeout=60) for stub in stubs]
        firsts = [next(call) for call in slow]
        crowd()
        server.wait_for_metric("pellucid_requests_finished_total", 4, reason="slow_consumer")
        server.wait_for_metric("pellucid_requests_running", 0)
        assert server.metric("pellucid_errors_total", reason="SLOW_CONSUMER") == 4
        assert server.metric(memory) - before < 20e6
        # What they read after all is a beginning without gaps, and then the reason.
        for first, call in zip(firsts[:3], slow[:3], strict=True):
            tokens = list(first.outputs[0].token_ids)
            with pytest.raises(grpc.RpcError) as caught:
                add_rest(tokens, call)
            found = failure(caught.value)
            assert (found.code, found.reason) == ("RESOURCE_EXHAUSTED", "SLOW_CONSUMER")
            assert tokens == [FIRST_TOKEN + i % PERIOD for i in range(len(tokens))]
        # A stream that nobody reads to its end is no reason to stay.
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 10


def add_rest(tokens: list[int], call: Any) -> None:
    for message in call:
        tokens += message.outputs[0].token_ids


def test_a_reader_that_sleeps_within_the_limit_gets_everything(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    script = Script(lives=str(tmp_path / "lives"), context_length=100_000, kv_block_count=25_000)
    limits = ("--slow-reader-seconds", "30", "--slow-reader-bytes", "1KiB")
    with serve(tmp_path, *limits, program=script.program()) as server:
        narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        stub = inference_pb2_grpc.InferenceServiceStub(server.channel(narrow))
        call = stub.Generate(request([5], stopping={"max_new_tokens": 4000}), timeout=60)
        first = next(call)
        server.wait_for_metric("pellucid_requests_running", 0)
        time.sleep(0.2)
        answer = collect([first, *call])
    assert answer.token_ids == [FIRST_TOKEN + i % PERIOD for i in range(4000)]


def test_load_is_told(server: ServerProcess, service: inference_pb2_grpc.InferenceServiceStub) -> None:
    stub = server_pb2_grpc.ServerServiceStub(server.channel())
    idle = stub.GetLoad(server_pb2.GetLoadRequest())
    assert (idle.running_request_count, idle.queued_request_count, idle.draining) == (0, 0, False)
    assert idle.kv_block_count == 5000
    call = service.Generate(request(stopping=ENDLESS), timeout=60)
    next(call)
    next(call)
    assert stub.GetLoad(server_pb2.GetLoadRequest()).running_request_count == 1
    call.cancel()


def test_none_of_this_is_worth_a_line_in_the_log(server: ServerProcess) -> None:
    assert [event["message"] for event in server.events] == ["listening", "serving"]
    assert server.other_lines == []


def test_pings_every_second_are_welcome(tmp_path: Path) -> None:
    """The server's default of five minutes between pings ends in a GOAWAY that kills long, silent streams."""
    (tmp_path / "config.json").write_text(json.dumps({}))
    script = Script(lives=str(tmp_path / "lives"), step_seconds=0.01, token_pause_after=3)
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with serve(tmp_path, program=script.program()) as server:
        idle, silent = server.channel(options), server.channel(options)
        states: list[grpc.ChannelConnectivity] = []
        for channel in (idle, silent):
            assert generate(channel, [5], stopping={"max_new_tokens": 1}).reason == "max_new_tokens"
            channel.subscribe(states.append)
        stub = inference_pb2_grpc.InferenceServiceStub(silent)
        stream = stub.Generate(request([5], request_id="silent", stopping=LONG), timeout=60)
        messages = [next(stream)]
        time.sleep(4.5)
        for channel in (idle, silent):
            assert generate(channel, [5], stopping={"max_new_tokens": 1}).reason == "max_new_tokens"
        inference_pb2_grpc.InferenceServiceStub(idle).Cancel(inference_pb2.CancelRequest(request_id="silent"))
        answer = collect([*messages, *stream])
        assert (answer.reason, len(answer.token_ids)) == ("cancelled", 3)
        assert set(states) == {grpc.ChannelConnectivity.READY}
