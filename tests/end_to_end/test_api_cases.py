"""Failures that users of other servers reported, as requests to this one. Each docstring says what went wrong there."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.json_format import MessageToJson
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pellucid.v1 import inference_pb2, inference_pb2_grpc
from pellucid_model.tokenizers import CharacterTokenizer
from pellucid_testing.calls import GENERATE, Answer, Failure, collect, failure, generate, request
from pellucid_testing.checkpoints import CHARACTERS, TINY, tiny_checkpoint, tiny_config, tiny_model
from pellucid_testing.server import ServerProcess, serve
from pellucid_testing.stepping import reference_logits

V = TINY.vocab_size
CONFIG = tiny_config(context_length=512)
BLOCK = 16
FLOATS = {
    "temperature": -1.0,
    "top_p": -1.0,
    "min_p": -1.0,
    "typical_p": -1.0,
    "repetition_penalty": -1.0,
    "presence_penalty": -3.0,
    "frequency_penalty": -3.0,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("cases") / "tiny", CONFIG)
    flags = ("--dtype", "float32", "--threads", "1", "--kv-block-size", str(BLOCK), "--kv-cache-memory", "4MiB")
    with serve(folder, *flags, "--default-max-new-tokens", "40", "--max-new-tokens-limit", "300") as running:
        yield running


@pytest.fixture
def channel(server: ServerProcess) -> grpc.Channel:
    return server.channel()


def refused(channel: grpc.Channel, message: inference_pb2.GenerateRequest) -> Failure:
    return failure(inference_pb2_grpc.InferenceServiceStub(channel).Generate(message, timeout=20))


def check_alive(channel: grpc.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
    answer = generate(channel, "abc", sampling={"temperature": 0}, stopping={"max_new_tokens": 2, "ignore_eos": True})
    assert len(answer.token_ids) == 2


def seeded(seed: int | None = 5, **sampling: Any) -> dict[str, Any]:
    """A request of 24 tokens."""
    chosen = sampling if seed is None else {"seed": seed, **sampling}
    return {"sampling": chosen, "stopping": {"max_new_tokens": 24, "ignore_eos": True}}


def test_top_k_at_every_edge(channel: grpc.Channel) -> None:
    """B16: a top_k of 0, more than the vocabulary or above int32 kills the server for everybody."""
    off = generate(channel, "abc", **seeded()).token_ids
    answers = {k: generate(channel, "abc", **seeded(top_k=k)).token_ids for k in (0, 1, V - 1, V, V + 1, 2**31 - 1)}
    assert answers[0] == answers[V] == answers[V + 1] == answers[2**31 - 1] == off
    assert answers[1] == generate(channel, "abc", **seeded(temperature=0)).token_ids != off
    for k in (2**31, 2**32 - 1):
        assert list(refused(channel, request("abc", sampling={"top_k": k})).violations) == ["sampling.top_k"]
        check_alive(channel)


@pytest.mark.parametrize("field", FLOATS)
def test_numbers_that_are_none(channel: grpc.Channel, field: str) -> None:
    """B18: a NaN or infinite temperature passes checks written as `x < 0` and poisons all later requests."""
    for value in (math.nan, math.inf, -math.inf, FLOATS[field], 1e30):
        found = refused(channel, request("abc", sampling={field: value}))
        assert (found.code, list(found.violations)) == ("INVALID_ARGUMENT", [f"sampling.{field}"])
    check_alive(channel)


def test_ids_and_counts_beyond_the_vocabulary_disturb_nobody(channel: grpc.Channel) -> None:
    """B19: ids or counts beyond the vocabulary crash the engine, or write into a neighbour's row."""
    beside: dict[str, Any] = {"sampling": {"seed": 3}, "stopping": {"max_new_tokens": 300, "ignore_eos": True}}
    alone = generate(channel, "abc", **beside).token_ids
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    stream = stub.Generate(request("abc", **beside), timeout=30)
    messages = [next(stream)]
    for message, field in (
        (request(sampling={"logit_bias": {V: 1}}), f"sampling.logit_bias[{V}]"),
        (request(sampling={"logit_bias": {0: 1e38}}), "sampling.logit_bias[0]"),
        (request(sampling={"logit_bias": {0: math.nan}}), "sampling.logit_bias[0]"),
        (request(sampling={"allowed_token_ids": [V]}), "sampling.allowed_token_ids[0]"),
        (request(stopping={"stop_token_ids": [V], "min_new_tokens": 1}), "stopping.stop_token_ids[0]"),
        (request(output={"output_logprobs": {"top_count": V + 1}}), "output.output_logprobs.top_count"),
        (request(output={"prompt_logprobs": {"top_count": 10**6}}), "output.prompt_logprobs.top_count"),
        (request(output={"output_logprobs": {"token_ids": [V]}}), "output.output_logprobs.token_ids[0]"),
        (request([V]), "token_ids.ids[0]"),
    ):
        assert list(refused(channel, message).violations) == [field]
    # At the very edge all is well.
    edge = {"logit_bias": {V - 1: 100, 0: -100}, "allowed_token_ids": [V - 1]}
    stops = {"stop_token_ids": [V - 1], "min_new_tokens": 1, "max_new_tokens": 3}
    answer = generate(
        channel, [V - 1], sampling=edge, stopping=stops, output={"output_logprobs": {"token_ids": [V - 1]}}
    )
    assert (answer.token_ids, answer.reason) == ([], "no_token")
    assert generate(channel, [V - 1], sampling=edge, stopping={"max_new_tokens": 3}).token_ids == [V - 1] * 3
    messages += stream
    assert [token for message in messages for token in message.outputs[0].token_ids] == alone


def test_one_request_id_for_two_requests(server: ServerProcess, channel: grpc.Channel) -> None:
    """B20: two live requests with one client-chosen id crash the server or mix their outputs."""
    long: dict[str, Any] = {"sampling": {"seed": 3}, "stopping": {"max_new_tokens": 300, "ignore_eos": True}}
    alone = generate(channel, "abc", **long).token_ids
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    slowly = {"min_tokens_per_message": 1}
    with server.engine_stopped():
        stream = stub.Generate(request("abc", request_id="same", output=slowly, **long), timeout=60)
        server.wait_for_queue(1)
        for _ in range(3):
            found = refused(channel, request("xyz", request_id="same"))
            assert (found.code, found.reason) == ("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
    assert [token for message in stream for token in message.outputs[0].token_ids] == alone
    server.wait_for_metric("pellucid_requests_running", 0)
    server.wait_for_metric("pellucid_requests_waiting", 0)
    assert generate(channel, "abc", request_id="same", stopping={"max_new_tokens": 1}).prompt.request_id == "same"


def test_zero_is_a_seed(channel: grpc.Channel) -> None:
    """B25: seed 0 is read as "no seed" because of a truth test."""
    for seed in (0, 2**32 - 1, 2**63 - 1, 2**64 - 1):
        first, second = (generate(channel, "abc", **seeded(seed)) for _ in range(2))
        assert first.token_ids == second.token_ids
        assert first.prompt.effective_sampling.seed == seed
    assert len({tuple(generate(channel, "abc", **seeded(None)).token_ids) for _ in range(5)}) == 5


def logprobs(answer: Answer, index: int = 0) -> list[inference_pb2.TokenLogprob]:
    return [entry for delta in answer.deltas(index) for entry in delta.logprobs]


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 1}, {"logit_bias": dict.fromkeys(range(4, 30), -100.0)}, {"temperature": 0}, {"min_p": 0.9, "seed": 1}],
)
def test_logprobs_are_finite_and_the_models_own(channel: grpc.Channel, sampling: dict[str, Any]) -> None:
    """B29: filtered tokens have logprob -inf, and the JSON of the answer fails."""
    output: Any = {"output_logprobs": {"top_count": 3}, "return_prompt_token_ids": True}
    answer = generate(
        channel, "abc", sampling=sampling, stopping={"max_new_tokens": 8, "ignore_eos": True}, output=output
    )
    entries = logprobs(answer)
    assert [entry.token_id for entry in entries] == answer.token_ids
    assert len(entries) == 8
    tokens = [*answer.prompt.token_ids, *answer.token_ids]
    rows = torch.log_softmax(reference_logits(tiny_model(CONFIG), tokens).double(), -1)
    for place, entry in enumerate(entries, start=len(answer.prompt.token_ids) - 1):
        row = rows[place]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        best = row.topk(3)
        assert [other.token_id for other in entry.alternatives] == best.indices.tolist()
        assert [other.logprob for other in entry.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [other.rank for other in entry.alternatives] == [1, 2, 3]
    for message in answer.messages:
        shown = json.loads(MessageToJson(message))
        for entry in shown["outputs"][0].get("logprobs", []):
            assert math.isfinite(entry["logprob"])
            assert entry["logprob"] <= 0


def test_logprobs_of_a_prompt_are_the_same_cold_and_warm(channel: grpc.Channel) -> None:
    """B30: with prefix caching, prompt logprobs are wrong in shape, have holes, or are somebody else's."""
    prompt = [4 + (i * i) % (V - 4) for i in range(3 * BLOCK + 2)]
    wish: dict[str, Any] = {
        "stopping": {"max_new_tokens": 0},
        "output": {"prompt_logprobs": {"top_count": 2}},
        "cache": {"salt": "B30"},
    }

    def entries(tokens: list[int]) -> list[inference_pb2.TokenLogprob]:
        return list(generate(channel, tokens, **wish).prompt.logprobs)

    cold = entries(prompt)
    assert [entry.token_id for entry in cold] == prompt
    assert [entry.HasField("logprob") for entry in cold] == [False] + [True] * (len(prompt) - 1)
    rows = torch.log_softmax(reference_logits(tiny_model(CONFIG), prompt).double(), -1)
    expected = [float(rows[place, token]) for place, token in enumerate(prompt[1:])]
    assert [entry.logprob for entry in cold[1:]] == pytest.approx(expected, abs=1e-4)
    assert entries(prompt) == cold
    other = prompt[:BLOCK] + [7] * (2 * BLOCK)
    generate(channel, other, stopping={"max_new_tokens": 2}, cache={"salt": "B30"})
    assert [entry.token_id for entry in entries(other)] == other
    assert entries(prompt) == cold


@pytest.mark.parametrize("mode", ["DELIVERY_MODE_INCREMENTAL", "DELIVERY_MODE_FINAL"])
@pytest.mark.parametrize("scored", [False, True])
def test_few_new_tokens_or_none(channel: grpc.Channel, mode: str, scored: bool) -> None:
    """B34: max_tokens = 0, which only scores the prompt, kills the engine."""
    output: dict[str, Any] = {"delivery_mode": mode}
    if scored:
        output |= {"output_logprobs": {}, "prompt_logprobs": {}}
    for count in (0, 1, 2):
        answer = generate(channel, "abc", stopping={"max_new_tokens": count, "ignore_eos": True}, output=output)
        assert (len(answer.token_ids), answer.reason) == (count, "max_new_tokens")
        assert (answer.usage.prompt_token_count, answer.usage.output_token_count) == (4, count)
        assert len(logprobs(answer)) == (count if scored else 0)
        assert len(answer.prompt.logprobs) == (4 if scored else 0)
        if count == 0:
            assert answer.text == ""


def test_without_a_limit_there_is_one(server: ServerProcess, channel: grpc.Channel) -> None:
    """B35: with no limit given and a model that never ends, a sliding context goes on for ever."""
    for overflow in ("ROLL", "REENCODE"):
        context = {"overflow": f"CONTEXT_OVERFLOW_{overflow}", "window_tokens": 8, "sink_tokens": 0}
        answer = generate(channel, "abc", stopping={"ignore_eos": True}, context=context)
        assert (len(answer.token_ids), answer.reason) == (40, "max_new_tokens")
        assert answer.prompt.effective_max_new_tokens == 40
    found = refused(channel, request("abc", stopping={"max_new_tokens": 301}))
    assert "from 0 to 300" in found.violations["stopping.max_new_tokens"]
    server.wait_for_metric("pellucid_requests_running", 0)


def test_prompts_of_nothing(channel: grpc.Channel, tmp_path: Path) -> None:
    """B36: an empty prompt of a tokenizer that adds no BOS makes an empty row, and the server dies."""
    one: dict[str, Any] = {"stopping": {"max_new_tokens": 1, "ignore_eos": True}}
    # This tokenizer adds BOS: the empty text is one token.
    for text, count in (("", 1), (" ", 2), ("\0", 2)):
        assert generate(channel, text, **one).usage.prompt_token_count == count
    assert list(refused(channel, request([])).violations) == ["token_ids.ids"]
    assert list(refused(channel, request("", omit_special_tokens=True)).violations) == ["text"]
    check_alive(channel)
    folder = tiny_checkpoint(tmp_path / "no-bos", CONFIG)
    special = {"pad": "<pad>", "eos": "<eos>", "unk": "<unk>"}
    CharacterTokenizer(sorted(set(CHARACTERS)), special).save(folder)
    with serve(folder, "--threads", "1", "--kv-cache-memory", "1MiB") as bare:
        other = bare.channel()
        found = refused(other, request(""))
        assert (found.code, found.violations) == (
            "INVALID_ARGUMENT",
            {"text": "comes to 0 tokens; accepted: 1 token or more"},
        )
        assert generate(other, " ", **one).usage.prompt_token_count == 1
        check_alive(other)


@pytest.mark.parametrize("bad", [b"\xed\xa0\x80", b"\xc0\x80", b"\xff"])
def test_texts_that_are_no_text(channel: grpc.Channel, bad: bytes) -> None:
    """B38: lone surrogates or invalid UTF-8 raise in the tokenizer or the serializer and end as a 500."""
    raw: Any = channel.unary_stream(GENERATE)
    size = len(bad)
    text = bytes([3 << 3 | 2, size]) + bad
    stop = bytes([3 << 3 | 2, 1]) + b"x" + bytes([8 << 3 | 2, size + 2, 3 << 3 | 2, size]) + bad
    content = bytes([2 << 3 | 2, size]) + bad
    chat = bytes([5 << 3 | 2, size + 4, 1 << 3 | 2, size + 2]) + content
    for message, field in ((text, "text"), (stop, "stopping.stop_strings[0]"), (chat, "chat.messages[0].content")):
        found = failure(raw(message, timeout=20))
        assert (found.code, list(found.violations)) == ("INVALID_ARGUMENT", [field])
    for good in ("\0", "\U0010ffff"):
        answer = generate(channel, f"a{good}", stopping={"max_new_tokens": 1, "stop_strings": [good]})
        assert answer.usage.prompt_token_count == 3
    check_alive(channel)


def test_constraints(channel: grpc.Channel) -> None:
    output: dict[str, Any] = {"sampling": {"seed": 4, "sequence_count": 2}, "stopping": {"max_new_tokens": 40}}
    answer = generate(channel, "abc", **output, constraint={"regex": "[a-c]{9}"})
    for index in range(2):
        text, ids, reason = answer.sequence(index)
        assert re.fullmatch("[a-c]{9}", text)
        assert (len(ids), reason) == (9, "constraint_done")
    assert answer.sequence(0) != answer.sequence(1)
    chosen = generate(channel, "abc", **output, constraint={"choices": {"values": ["天地", "日月"]}})
    assert {chosen.sequence(index)[0] for index in range(2)} <= {"天地", "日月"}
    for kind, text in (
        ("regex", "("),
        ("json_schema", "{"),
        ("json_schema", '{"type": 5}'),
        ("ebnf_grammar", "root ::= nope"),
    ):
        found = refused(channel, request("abc", constraint={kind: text}))
        assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert list(found.violations) == [f"constraint.{kind}"]
        assert "\n" not in found.message
    check_alive(channel)


def test_everything_at_once_goes_on_over_a_killed_engine(server: ServerProcess, channel: grpc.Channel) -> None:
    """Sequences, their log-probabilities, penalties and the constraint are what they were without the death."""
    fields: dict[str, Any] = {
        "sampling": {"seed": 9, "sequence_count": 3, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        "stopping": {"max_new_tokens": 280},
        "output": {
            "output_logprobs": {"top_count": 2},
            "prompt_logprobs": {"top_count": 1},
            "min_tokens_per_message": 1,  # so that 20 messages are far from the end
        },
        "constraint": {"regex": "[a-z ,.!?]{280}"},
        "cache": {"salt": "recovery"},
    }
    quiet = generate(channel, "abc", **fields)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    # On a busy machine the answer may be there before its twentieth message has been read.
    for count in (20, 20, 5, 1, 1, 1):
        restarts = server.metric("pellucid_engine_restarts_total")
        stream = stub.Generate(request("abc", **fields), timeout=60)
        messages = list(itertools.islice(stream, count))
        os.kill(server.engine_pid(), signal.SIGKILL)
        answer = collect([*messages, *stream])
        for index in range(3):
            assert answer.sequence(index) == quiet.sequence(index)
            assert len(answer.sequence(index)[1]) == 280
            assert logprobs(answer, index) == logprobs(quiet, index)
        assert answer.prompt.logprobs == quiet.prompt.logprobs
        server.wait_for_metric("pellucid_engine_restarts_total", restarts + 1)
        server.wait_for_metric("pellucid_engine_up", 1)
        if answer.timings.engine_recovery_count == 1:
            return
    raise AssertionError("the engine was never killed in the middle")
