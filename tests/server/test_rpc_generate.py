"""Generate against a real server with a real engine: what comes back, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pellucid.v1 import inference_pb2, inference_pb2_grpc
from pellucid_model.tokenizers import CharacterTokenizer, Tokenizer, load_tokenizer
from pellucid_testing.calls import GENERATE, Failure, collect, failure, generate, request
from pellucid_testing.checkpoints import tiny_checkpoint
from pellucid_testing.server import ServerProcess, serve

GREEDY = {"temperature": 0.0}
CONTEXT, CACHE = 128, 96
BYTES_PER_BLOCK = 2 * 2 * 2 * 12 * 4 * 4  # layers, k and v, kv heads, head_dim, float32, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    memory = str(CACHE // 4 * BYTES_PER_BLOCK)
    arguments = ("--dtype", "float32", "--kv-block-size", "4", "--kv-cache-memory", memory, "--threads", "1")
    with serve(folder, *arguments, "--max-new-tokens-limit", "1000", "--context-overflow", "reject") as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> grpc.Channel:
    return server.channel()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, CharacterTokenizer)
    return loaded


def refused(channel: grpc.Channel, *arguments: Any, **fields: Any) -> Failure:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return failure(stub.Generate(request(*arguments, **fields), timeout=20))


def test_the_first_message_says_what_is_in_force(channel: grpc.Channel, tokenizer: Tokenizer) -> None:
    answer = generate(channel, "hello", stopping={"max_new_tokens": 5, "stop_token_ids": [9]}, request_id="mine")
    prompt = answer.prompt
    assert (prompt.request_id, prompt.model) == ("mine", "tiny")
    assert prompt.prompt_token_count == len(tokenizer.encode("hello")) == 6
    assert (prompt.dropped_token_count, list(prompt.token_ids)) == (0, [])
    sampling = prompt.effective_sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
    assert all(sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "min_p", "seed"))
    assert prompt.effective_max_new_tokens == 5
    assert prompt.effective_context.overflow == inference_pb2.CONTEXT_OVERFLOW_REJECT
    assert list(prompt.effective_stopping.stop_token_ids) == sorted({9, *tokenizer.eos_ids})


def test_text_ids_usage_and_timings(channel: grpc.Channel, tokenizer: Tokenizer) -> None:
    answer = generate(channel, "hello", sampling=GREEDY, stopping={"max_new_tokens": 12, "ignore_eos": True})
    assert answer.reason == "max_new_tokens"
    assert len(answer.token_ids) == answer.usage.output_token_count == 12
    assert answer.usage.prompt_token_count == 6
    assert answer.text == tokenizer.decode(answer.token_ids)
    timings = answer.timings
    parts = [timings.queue_time, timings.prefill_time, timings.decode_time]
    assert all(part.ToNanoseconds() > 0 for part in parts)
    assert timings.time_to_first_token.ToNanoseconds() == pytest.approx(
        sum(p.ToNanoseconds() for p in parts[:2]), abs=3
    )
    assert timings.total_time.ToNanoseconds() == pytest.approx(sum(p.ToNanoseconds() for p in parts), abs=3)
    assert (timings.preemption_count, timings.engine_recovery_count) == (0, 0)


def test_however_it_is_delivered_the_answer_is_the_same(channel: grpc.Channel) -> None:
    stopping = {"max_new_tokens": 20, "ignore_eos": True}
    whole = generate(channel, sampling=GREEDY, stopping=stopping)
    final = generate(
        channel, sampling=GREEDY, stopping=stopping, output={"delivery_mode": inference_pb2.DELIVERY_MODE_FINAL}
    )
    assert len(final.messages) == 1
    gathered = generate(channel, sampling=GREEDY, stopping=stopping, output={"min_tokens_per_message": 8})
    sizes = [len(message.outputs[0].token_ids) for message in gathered.messages]
    assert all(size >= 8 for size in sizes[1:-1])
    assert len(sizes) <= 4
    for other in (final, gathered):
        assert (other.text, other.token_ids, other.reason) == (whole.text, whole.token_ids, whole.reason)


def test_parts_of_the_output_can_be_left_out(channel: grpc.Channel, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"sampling": GREEDY, "stopping": {"max_new_tokens": 9, "ignore_eos": True}}
    whole = generate(channel, **options)
    no_text = generate(channel, output={"omit_text": True}, **options)
    assert (no_text.text, no_text.token_ids) == ("", whole.token_ids)
    no_ids = generate(channel, output={"omit_token_ids": True}, **options)
    assert (no_ids.text, no_ids.token_ids) == (whole.text, [])
    assert no_ids.usage.output_token_count == 9
    with_prompt = generate(channel, output={"return_prompt_token_ids": True}, **options)
    assert list(with_prompt.prompt.token_ids) == tokenizer.encode("hello")


def test_prompts_as_text_and_as_ids_are_the_same(channel: grpc.Channel, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"sampling": GREEDY, "stopping": {"max_new_tokens": 8}}
    text = generate(channel, "hello", **options)
    assert generate(channel, tokenizer.encode("hello"), **options).token_ids == text.token_ids
    bare = generate(channel, "hello", omit_special_tokens=True, **options)
    assert bare.usage.prompt_token_count == text.usage.prompt_token_count - 1


def test_special_tokens_in_text_are_text_unless_asked(channel: grpc.Channel) -> None:
    options: dict[str, Any] = {"stopping": {"max_new_tokens": 1}, "output": {"return_prompt_token_ids": True}}
    plain = generate(channel, "a<eos>b", **options)
    parsed = generate(channel, "a<eos>b", parse_special_tokens=True, **options)
    assert 2 not in plain.prompt.token_ids
    assert list(parsed.prompt.token_ids).count(2) == 1
    assert plain.usage.prompt_token_count > parsed.usage.prompt_token_count


def test_seeds(channel: grpc.Channel) -> None:
    def ids(**sampling: Any) -> tuple[int, ...]:
        return tuple(generate(channel, sampling=sampling, stopping={"max_new_tokens": 16}).token_ids)

    for seed in (0, 2**32 - 1, 2**64 - 1):
        assert ids(seed=seed) == ids(seed=seed)
    assert len({ids() for _ in range(5)}) > 1
    drawn = generate(channel, stopping={"max_new_tokens": 16})
    assert ids(seed=drawn.prompt.effective_sampling.seed) == tuple(drawn.token_ids)


def test_zero_is_a_value(channel: grpc.Channel) -> None:
    zeros = {"temperature": 0, "top_k": 0, "min_p": 0, "seed": 0}
    answer = generate(channel, sampling=zeros, stopping={"max_new_tokens": 2})
    sampling = answer.prompt.effective_sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (0, 0, 0, 0)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_new_tokens(channel: grpc.Channel, count: int) -> None:
    answer = generate(channel, stopping={"max_new_tokens": count, "ignore_eos": True})
    assert (answer.reason, len(answer.token_ids)) == ("max_new_tokens", count)
    assert answer.usage.prompt_token_count == 6
    assert answer.timings.HasField("time_to_first_token") is (count > 0)
    if count == 0:
        assert len(answer.messages) == 1


def test_the_room_ends_a_request(channel: grpc.Channel) -> None:
    for stopping in ({"max_new_tokens": 1000, "ignore_eos": True}, {"ignore_eos": True}):
        answer = generate(channel, [5] * 60, stopping=stopping)
        assert (answer.reason, len(answer.token_ids)) == ("context_full", CACHE - 60)
        assert answer.prompt.effective_max_new_tokens == CACHE - 60


def test_prompts_beyond_context_or_cache(channel: grpc.Channel) -> None:
    long = refused(channel, [5] * (CONTEXT + 1))
    assert (long.code, long.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert "129 tokens" in long.violations["token_ids.ids"]
    assert "128 tokens" in long.violations["token_ids.ids"]
    assert refused(channel, "x" * 200).violations["text"].startswith("has 201 tokens")
    assert refused(channel, "x" * 10_000).violations["text"].startswith("has at least 2000 tokens")
    large = refused(channel, [5] * (CACHE + 1))
    assert (large.code, large.reason) == ("RESOURCE_EXHAUSTED", "REQUEST_TOO_LARGE")
    assert "97 prompt tokens" in large.message
    assert "96 tokens" in large.message
    assert large.retry_after is None
    full = generate(channel, [5] * CACHE, stopping={"max_new_tokens": 0})
    assert full.usage.prompt_token_count == CACHE


def test_what_can_never_fit_holds_nobody_up(channel: grpc.Channel) -> None:
    """A request larger than the whole cache waits for ever at the head of the queue, and everybody behind it."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    short: dict[str, Any] = {"sampling": GREEDY, "stopping": {"max_new_tokens": 30, "ignore_eos": True}}
    alone = generate(channel, "abc", **short).token_ids
    calls = []
    for length in (CACHE + 1, CONTEXT - 1) * 3:
        assert refused(channel, [5] * length).reason == "REQUEST_TOO_LARGE"
        calls.append(stub.Generate(request("abc", **short), timeout=20))
    # One that fits at first, and outgrows the cache, ends there; it does not push itself out for ever.
    outgrown = stub.Generate(request([5] * 20, stopping={"max_new_tokens": 1000, "ignore_eos": True}), timeout=20)
    assert [collect(call).token_ids for call in calls] == [alone] * 6
    answer = collect(outgrown)
    assert (answer.reason, len(answer.token_ids)) == ("context_full", CACHE - 20)


def test_truncation_on_request(channel: grpc.Channel) -> None:
    policy = inference_pb2.ContextPolicy(overflow=inference_pb2.CONTEXT_OVERFLOW_TRUNCATE)
    prompt = [4 + i % 20 for i in range(500)]
    stopping = {"max_new_tokens": 100, "ignore_eos": True}
    answer = generate(channel, prompt, context=policy, sampling=GREEDY, stopping=stopping)
    kept = CONTEXT // 2
    assert answer.prompt.dropped_token_count == 500 - kept
    assert (answer.prompt.prompt_token_count, answer.usage.prompt_token_count) == (500, 500)
    assert answer.prompt.effective_context.overflow == inference_pb2.CONTEXT_OVERFLOW_TRUNCATE
    assert (answer.reason, len(answer.token_ids)) == ("context_full", CACHE - kept)
    alone = generate(channel, prompt[-kept:], sampling=GREEDY, stopping=stopping)
    assert alone.token_ids == answer.token_ids


def test_stop_strings(channel: grpc.Channel) -> None:
    options: dict[str, Any] = {"sampling": GREEDY}
    whole = generate(channel, stopping={"max_new_tokens": 20, "ignore_eos": True}, **options)
    stop = whole.text[5:8]
    assert len(stop) == 3
    begin = whole.text.index(stop)
    cut = generate(channel, stopping={"max_new_tokens": 20, "ignore_eos": True, "stop_strings": [stop]}, **options)
    assert (cut.text, cut.reason, cut.finish.matched_stop_string) == (whole.text[:begin], "stop_string", stop)
    assert len(cut.token_ids) < 20
    kept = generate(
        channel,
        stopping={"max_new_tokens": 20, "ignore_eos": True, "stop_strings": [stop], "include_stop_in_text": True},
        **options,
    )
    assert kept.text == whole.text[: begin + 3]
    missed = generate(channel, stopping={"max_new_tokens": 20, "ignore_eos": True, "stop_strings": ["zzzz"]}, **options)
    assert (missed.text, missed.reason) == (whole.text, "max_new_tokens")


def test_stop_tokens_and_min_new_tokens(channel: grpc.Channel) -> None:
    whole = generate(channel, sampling=GREEDY, stopping={"max_new_tokens": 10, "ignore_eos": True})
    stop = whole.token_ids[3]
    first = whole.token_ids.index(stop)
    stopping = {"max_new_tokens": 10, "ignore_eos": True, "stop_token_ids": [stop]}
    cut = generate(channel, sampling=GREEDY, stopping=stopping)
    assert (cut.token_ids, cut.reason) == (whole.token_ids[: first + 1], "stop_token")
    assert cut.finish.matched_token_id == stop
    held = generate(channel, sampling=GREEDY, stopping={**stopping, "min_new_tokens": 8})
    assert len(held.token_ids) >= 8
    assert stop not in held.token_ids[:7]


def test_invalid_values_are_refused_and_harm_nobody(channel: grpc.Channel) -> None:
    before = generate(channel, sampling=GREEDY, stopping={"max_new_tokens": 6}).token_ids
    nan = refused(channel, sampling={"temperature": float("nan")}, stopping={"max_new_tokens": 5000})
    assert (nan.code, nan.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert set(nan.violations) == {"sampling.temperature", "stopping.max_new_tokens"}
    assert refused(channel, [10_000]).violations == {
        "token_ids.ids[0]": "10000 is not accepted; accepted: token ids from 0 to 51"
    }
    assert refused(channel, []).violations == {"token_ids.ids": "comes to 0 tokens; accepted: 1 token or more"}
    assert refused(channel, "", omit_special_tokens=True).violations["text"].startswith("comes to 0 tokens")
    other = refused(channel, model="other")
    assert (other.code, other.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert generate(channel, sampling=GREEDY, stopping={"max_new_tokens": 6}).token_ids == before


def test_raw_bytes_that_are_no_request(channel: grpc.Channel) -> None:
    raw: Any = channel.unary_stream(GENERATE)
    for payload, field, reason in (
        (b"\x1a\x03\xed\xa0\x80", "text", "INVALID_FIELD"),
        (b"\xff\xff", "pellucid.v1.GenerateRequest", "INVALID_FIELD"),
        (b"\x1a\x01a\x62\x01\x00"[:3] + b"\x6a\x01a", "field 13", "UNSUPPORTED_FIELD"),
    ):
        found = failure(raw(payload, timeout=20))
        assert (found.code, found.reason, list(found.violations)) == ("INVALID_ARGUMENT", reason, [field])


def test_metadata(channel: grpc.Channel) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.Generate(request(stopping={"max_new_tokens": 1}), metadata=[("x-request-id", "from-header")])
    (message,) = list(call)
    assert message.prompt.request_id == "from-header"
    headers = dict(call.initial_metadata())
    assert headers["x-request-id"] == "from-header"
    assert len(headers["x-pellucid-instance"]) == 12
    body_wins = stub.Generate(
        request(stopping={"max_new_tokens": 1}, request_id="正文 1"), metadata=[("x-request-id", "from-header")]
    )
    assert next(iter(body_wins)).prompt.request_id == "正文 1"
    assert dict(body_wins.initial_metadata())["x-request-id"] == "%E6%AD%A3%E6%96%87 1"
    # A refusal is trailers only, so that clients may retry; it names the request all the same.
    refusal = failure(stub.Generate(request(model="x"), metadata=[("x-request-id", "bad-one")]))
    assert refusal.headers == {}
    assert refusal.trailers["x-request-id"] == "bad-one"
    assert refusal.trailers["x-pellucid-instance"] == headers["x-pellucid-instance"]
    own = failure(stub.Generate(request(model="x", request_id="mine"), metadata=[("x-request-id", "bad-one")]))
    assert own.trailers["x-request-id"] == "mine"
    long = failure(stub.Generate(request(sampling={"top_p": 0}), metadata=[("x-request-id", "x" * 200)]))
    assert list(long.violations) == ["x-request-id", "sampling.top_p"]
    assert long.trailers["x-request-id"] == "x" * 128


def test_large_requests(channel: grpc.Channel) -> None:
    assert refused(channel, "x" * 5_000_000).reason == "PROMPT_TOO_LONG"
    beyond = refused(channel, "x" * (17 * 2**20))
    assert beyond.code == "RESOURCE_EXHAUSTED"
    assert generate(channel, stopping={"max_new_tokens": 1, "ignore_eos": True}).reason == "max_new_tokens"


def test_crowded_streams_equal_lone_ones(server: ServerProcess, channel: grpc.Channel) -> None:
    def options(index: int) -> dict[str, Any]:
        return {
            "sampling": {"temperature": 0.5 + index % 3, "seed": index, "top_k": index % 5},
            "stopping": {"max_new_tokens": 10 + index, "ignore_eos": True},
        }

    lone = [generate(channel, "abc" * (index + 1), **options(index)) for index in range(8)]
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    steps = server.metric("pellucid_step_batch_size_count")
    with server.engine_stopped():
        calls = [stub.Generate(request("abc" * (index + 1), **options(index)), timeout=60) for index in range(8)]
        server.wait_for_queue(8)
    crowded = [[token for message in call for token in message.outputs[0].token_ids] for call in calls]
    assert crowded == [answer.token_ids for answer in lone]
    tokens = sum(map(len, crowded))
    assert server.metric("pellucid_step_batch_size_count") - steps < tokens / 2, "they hardly ran together"


def test_nothing_is_left_behind(server: ServerProcess) -> None:
    server.wait_for_metric("pellucid_requests_running", 0)
    server.wait_for_metric("pellucid_requests_waiting", 0)
    server.wait_for_metric("pellucid_kv_cache_blocks", 0, state="used")
    ended = server.metric("pellucid_requests_finished_total") + server.metric("pellucid_request_rejections_total")
    assert ended > 50
    # What is above the size limit never reaches a handler.
    server.wait_for_metric("pellucid_requests_total", ended, method="Generate")
    # Refusals are the clients' business: they leave no trace in the log.
    assert {event["level"] for event in server.events} <= {"info", "warning"}
    assert server.other_lines == []
