"""Several sequences, log-probabilities and chat over gRPC, beside a scripted engine that knows them all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToJson

from pellucid.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from pellucid_model.tokenizers import CharacterTokenizer, load_tokenizer
from pellucid_testing.calls import Answer, Failure, collect, failure, generate, request
from pellucid_testing.scripted_engine import FIRST_TOKEN, Script
from pellucid_testing.server import ServerProcess, serve

CONTEXT = 4096
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrs"
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{ message.role }}{{ message.content | trim }}<eos>{% endfor %}{% if add_generation_prompt %}A{% endif %}"""
SEVERAL: dict[str, Any] = {"sampling": {"sequence_count": 3}, "stopping": {"max_new_tokens": 5, "ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "scripted"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    CharacterTokenizer.train([LETTERS]).save(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    size: dict[str, Any] = {"context_length": CONTEXT, "kv_block_count": CONTEXT}
    script = Script(lives=str(folder / "lives"), step_seconds=0.002, cached_tokens=2, **size)
    arguments = ("--max-running", "4", "--max-queue", "4", "--max-logprobs", "3")
    with serve(folder, *arguments, program=script.program()) as running:
        yield running


@pytest.fixture
def channel(server: ServerProcess) -> grpc.Channel:
    return server.channel()


def refused(channel: grpc.Channel, message: inference_pb2.GenerateRequest) -> Failure:
    return failure(inference_pb2_grpc.InferenceServiceStub(channel).Generate(message, timeout=20))


def test_what_is_served_says_what_may_be_asked_for(channel: grpc.Channel) -> None:
    (model,) = model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest()).models
    assert set(model.features) == set(model_pb2.Feature.values()) - {model_pb2.FEATURE_UNSPECIFIED}
    assert model.max_top_logprobs == 3
    sampling = model.default_sampling
    assert (sampling.typical_p, sampling.repetition_penalty, sampling.presence_penalty) == (1, 1, 0)
    assert not sampling.HasField("sequence_count")


def test_several_sequences_have_one_end_each_and_share_the_last_message(
    server: ServerProcess, channel: grpc.Channel
) -> None:
    answer = generate(channel, "ABC", **SEVERAL)
    text = "".join(LETTERS[:5])
    assert [answer.sequence(index) for index in range(3)] == [
        (text, list(range(FIRST_TOKEN, FIRST_TOKEN + 5)), "max_new_tokens")
    ] * 3
    assert (answer.usage.output_token_count, answer.usage.prompt_token_count) == (15, 4)
    assert (answer.usage.cached_token_count, answer.prompt.cached_token_count) == (2, 2)
    final = generate(channel, "ABC", **SEVERAL, output={"delivery_mode": inference_pb2.DELIVERY_MODE_FINAL})
    assert len(final.messages) == 1
    assert [final.sequence(index) for index in range(3)] == [answer.sequence(index) for index in range(3)]
    gathered = generate(channel, "ABC", **SEVERAL, output={"min_tokens_per_message": 256, "omit_text": True})
    assert len(gathered.messages) <= 2
    server.wait_for_metric("pellucid_requests_running", 0)


def test_more_sequences_than_the_server_lets_in(server: ServerProcess, channel: grpc.Channel) -> None:
    found = refused(channel, request(sampling={"sequence_count": 9}))
    assert found.violations == {"sampling.sequence_count": "9 is not accepted; accepted: a whole number from 1 to 8"}
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    endless: dict[str, Any] = {"stopping": {"max_new_tokens": 10_000}}
    first = stub.Generate(request("A", sampling={"sequence_count": 6}, **endless), timeout=60)
    next(first)
    found = refused(channel, request("A", sampling={"sequence_count": 3}))
    assert (found.code, found.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert "6 of 8 places are taken, and this request needs 3" in found.message
    first.cancel()
    server.wait_for_metric("pellucid_requests_running", 0)
    server.wait_for_metric("pellucid_requests_waiting", 0)


def test_a_cancel_ends_every_sequence(server: ServerProcess, channel: grpc.Channel) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    fields: dict[str, Any] = {"sampling": {"sequence_count": 3}, "stopping": {"max_new_tokens": 10_000}}
    stream = stub.Generate(request("A", request_id="mine", **fields), timeout=20)
    messages = [next(stream)]
    assert stub.Cancel(inference_pb2.CancelRequest(request_id="mine")).result == inference_pb2.CANCEL_RESULT_CANCELLED
    answer = collect([*messages, *stream])
    assert {answer.sequence(index)[2] for index in range(3)} == {"cancelled"}
    server.wait_for_metric("pellucid_requests_waiting", 0)


def logprobs(answer: Answer, index: int = 0) -> list[inference_pb2.TokenLogprob]:
    return [entry for delta in answer.deltas(index) for entry in delta.logprobs]


def test_logprobs_stand_beside_each_token(channel: grpc.Channel, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    output: Any = {
        "output_logprobs": {"top_count": 3, "token_ids": [9]},
        "prompt_logprobs": {"start_position": 1, "top_count": 1},
    }
    answer = generate(channel, "AB", sampling={"sequence_count": 2}, stopping={"max_new_tokens": 4}, output=output)
    for index in range(2):
        for delta in answer.deltas(index):
            assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
        entries = logprobs(answer, index)
        assert [entry.token for entry in entries] == [b"A", b"B", b"C", b"D"]
        assert [other.token_id for other in entries[0].alternatives] == [0, 1, 2, 9]
        assert entries[0].alternatives[0].token == tokenizer.token_bytes(0)
        assert all(math.isfinite(entry.logprob) for entry in entries)
    prompt = answer.prompt.logprobs
    assert [(entry.token_id, entry.logprob) for entry in prompt] == [(4, -1), (5, -2)]
    first = generate(channel, "AB", stopping={"max_new_tokens": 0}, output={"prompt_logprobs": {}}).prompt.logprobs
    assert [entry.HasField("logprob") for entry in first] == [False, True, True]
    assert json.loads(MessageToJson(answer.messages[0]))["outputs"][0]["logprobs"][0]["logprob"] == -0.5
    bare = generate(
        channel, "AB", stopping={"max_new_tokens": 4}, output={**output, "omit_text": True, "omit_token_ids": True}
    )
    assert (bare.text, bare.token_ids, len(logprobs(bare))) == ("", [], 4)


def test_logprobs_and_sequences_go_on_over_a_restarted_engine(folder: Path) -> None:
    """Nothing is told twice, although the engine dies in the middle."""
    output: Any = {"output_logprobs": {}, "prompt_logprobs": {}}
    fields: dict[str, Any] = {"sampling": {"sequence_count": 3}, "stopping": {"max_new_tokens": 60}, "output": output}
    script = Script(lives=str(folder / "dying"), die_after_steps=[20])
    with serve(folder, program=script.program()) as server:
        answer = generate(server.channel(), "AB", **fields)
    assert answer.timings.engine_recovery_count == 1
    expected = [FIRST_TOKEN + place % 26 for place in range(60)]
    for index in range(3):
        assert answer.sequence(index)[1] == expected
        assert [entry.token_id for entry in logprobs(answer, index)] == expected
    assert len(answer.prompt.logprobs) == 3


def test_a_stop_string_does_not_act_before_min_new_tokens(channel: grpc.Channel) -> None:
    """B32: a stop string ends the answer before min_tokens."""
    stopping: dict[str, Any] = {"stop_strings": ["B"], "max_new_tokens": 60}
    assert generate(channel, "A", stopping=stopping).sequence(0) == ("A", [4, 5], "stop_string")
    # The letters come again after 26.
    later = generate(channel, "A", stopping={**stopping, "min_new_tokens": 4})
    assert later.sequence(0)[0::2] == (LETTERS[:26] + "A", "stop_string")
    assert len(later.token_ids) == 28
    found = refused(channel, request("A", stopping={**stopping, "min_new_tokens": 61}))
    assert list(found.violations) == ["stopping.min_new_tokens"]


def test_chat(channel: grpc.Channel, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    messages = [{"role": "A", "content": " x<eos>y "}, {"role": "B", "content": ""}]
    chat = inference_pb2.Chat(messages=messages)
    fields: dict[str, Any] = {
        "chat": chat,
        "output": {"return_prompt_token_ids": True},
        "stopping": {"max_new_tokens": 1},
    }
    answer = collect(
        inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(**fields), timeout=20)
    )
    ids = list(answer.prompt.token_ids)
    assert [i for i in ids if i in tokenizer.special_ids - {tokenizer.special_tokens["<unk>"]}] == [1, 2, 2]
    assert ids[0] == tokenizer.bos_id
    assert answer.prompt.prompt_token_count == len(ids)
    # What the template writes behind an answer ends it.
    assert list(answer.prompt.effective_stopping.stop_token_ids) == [tokenizer.special_tokens["<eos>"]]


def test_what_chat_refuses(channel: grpc.Channel) -> None:
    def chat(*roles: str, **fields: Any) -> inference_pb2.GenerateRequest:
        messages: Any = [{"role": role, "content": "x"} for role in roles]
        return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages), **fields)

    found = refused(channel, chat("user", "tool", "user"))
    assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert found.violations == {"chat.messages[1]": "the model's chat template refuses it: no tools here"}
    assert set(refused(channel, chat()).violations) == {"chat.messages"}
    assert set(refused(channel, chat("user", "a b")).violations) == {"chat.messages[1].role"}
    assert set(refused(channel, chat("user", parse_special_tokens=True)).violations) == {"parse_special_tokens"}
    long = chat("user", context=inference_pb2.ContextPolicy(overflow=inference_pb2.CONTEXT_OVERFLOW_REJECT))
    long.chat.messages[0].content = "x" * CONTEXT
    assert refused(channel, long).reason == "PROMPT_TOO_LONG"


def test_a_broken_template_is_told_and_only_chat_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    CharacterTokenizer.train([LETTERS]).save(tmp_path)
    with serve(tmp_path, program=Script(lives=str(tmp_path / "lives")).program()) as server:
        (warning,) = [event["message"] for event in server.events if "chat template" in event["message"]]
        assert "line 1" in warning
        channel = server.channel()
        (model,) = model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest()).models
        assert model_pb2.FEATURE_CHAT not in model.features
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x")])
        found = refused(channel, inference_pb2.GenerateRequest(chat=chat))
        assert (found.reason, set(found.violations)) == ("UNSUPPORTED_FIELD", {"chat"})
        assert generate(channel, "A", stopping={"max_new_tokens": 1}).reason == "max_new_tokens"
