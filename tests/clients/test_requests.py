"""Python values as request messages: unset is not sent, 0 is sent as 0, and what cannot be sent is named."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from pellucid.v1 import inference_pb2
from pellucid_client import GenerateOptions, InvalidRequest
from pellucid_client._fields import ACCEPTED as ACCEPTED_WORDS
from pellucid_client._requests import (
    cancel_request,
    detokenize_request,
    generate_request,
    model_request,
    tokenize_request,
)
from pellucid_server.options import Integer, Option
from pellucid_server.ranges import SAMPLING
from pellucid_server.rpc.validation import MIN_TOKENS_PER_MESSAGE
from pellucid_server.rpc.validation_options import PRIORITY
from pellucid_server.served import MAX_SEQUENCES

# Option -> (its zero-like value, path of its field, the field's value).
ZEROS: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0, "sampling.temperature", 0.0),
    "top_k": (0, "sampling.top_k", 0),
    "top_p": (0, "sampling.top_p", 0.0),
    "min_p": (0, "sampling.min_p", 0.0),
    "seed": (0, "sampling.seed", 0),
    "typical_p": (0, "sampling.typical_p", 0.0),
    "repetition_penalty": (0, "sampling.repetition_penalty", 0.0),
    "presence_penalty": (0, "sampling.presence_penalty", 0.0),
    "frequency_penalty": (0, "sampling.frequency_penalty", 0.0),
    "n": (0, "sampling.sequence_count", 0),
    "max_new_tokens": (0, "stopping.max_new_tokens", 0),
    "sink_tokens": (0, "context.sink_tokens", 0),
    "min_tokens_per_message": (0, "output.min_tokens_per_message", 0),
    "time_limit": (0, "stopping.time_limit", None),
}
OTHERS: dict[str, tuple[Any, str, Any]] = {
    "model": ("demo", "model", "demo"),
    "request_id": ("mine", "request_id", "mine"),
    "min_new_tokens": (3, "stopping.min_new_tokens", 3),
    "stop": (["a", "。"], "stopping.stop_strings", ["a", "。"]),
    "stop_token_ids": ([5, 0], "stopping.stop_token_ids", [5, 0]),
    "include_stop_in_text": (True, "stopping.include_stop_in_text", True),
    "ignore_eos": (True, "stopping.ignore_eos", True),
    "priority": (-5, "priority", -5),
    "logit_bias": ({5: -1.5, 0: 2}, "sampling.logit_bias", {5: -1.5, 0: 2.0}),
    "allowed_token_ids": ([5, 0], "sampling.allowed_token_ids", [5, 0]),
    "json_schema": ({"type": "integer"}, "constraint.json_schema", '{"type": "integer"}'),
    "json_object": (True, "constraint.json_object", inference_pb2.JsonObject()),
    "regex": ("a+", "constraint.regex", "a+"),
    "ebnf_grammar": ('root ::= "a"', "constraint.ebnf_grammar", 'root ::= "a"'),
    "choices": (["a", "天"], "constraint.choices.values", ["a", "天"]),
    "logprobs": (3, "output.output_logprobs.top_count", 3),
    "logprob_token_ids": ([7], "output.output_logprobs.token_ids", [7]),
    "prompt_logprobs": (3, "output.prompt_logprobs.top_count", 3),
    "prompt_logprob_token_ids": ([7], "output.prompt_logprobs.token_ids", [7]),
    "prompt_logprobs_start": (2, "output.prompt_logprobs.start_position", 2),
    "bypass_cache_read": (True, "cache.bypass_read", True),
    "bypass_cache_write": (True, "cache.bypass_write", True),
    "cache_salt": ("mine", "cache.salt", "mine"),
    "omit_generation_prompt": (True, "chat.omit_generation_prompt", True),
    "context": ("truncate", "context.overflow", inference_pb2.CONTEXT_OVERFLOW_TRUNCATE),
    "window_tokens": (9, "context.window_tokens", 9),
    "hop_tokens": (3, "context.hop_tokens", 3),
    "omit_special_tokens": (True, "omit_special_tokens", True),
    "parse_special_tokens": (True, "parse_special_tokens", True),
    "keep_special_tokens": (True, "output.keep_special_tokens", True),
    "omit_text": (True, "output.omit_text", True),
    "omit_token_ids": (True, "output.omit_token_ids", True),
    "return_prompt_token_ids": (True, "output.return_prompt_token_ids", True),
    "delivery": ("final", "output.delivery_mode", inference_pb2.DELIVERY_MODE_FINAL),
}


def at(message: Message, path: str) -> Any:
    value: Any = message
    for name in path.split("."):
        value = getattr(value, name)
    if isinstance(value, MutableMapping):
        return dict(value)
    return list(value) if hasattr(value, "extend") else value


def has(message: Message, path: str) -> bool:
    *parents, leaf = path.split(".")
    for parent in parents:
        if not message.HasField(parent):
            return False
        message = getattr(message, parent)
    return message.HasField(leaf)


def options(**values: Any) -> GenerateOptions:
    return values  # type: ignore[return-value]


def test_the_tables_cover_every_option() -> None:
    assert {*ZEROS, *OTHERS, "timeout", "messages"} == GenerateOptions.__annotations__.keys()


def test_nothing_set_sends_the_prompt_alone() -> None:
    assert generate_request("hi", {}) == inference_pb2.GenerateRequest(text="hi")
    unset = options(**dict.fromkeys(GenerateOptions.__annotations__))
    assert generate_request("hi", unset) == inference_pb2.GenerateRequest(text="hi")


@pytest.mark.parametrize("option", ZEROS)
def test_zero_is_sent_as_zero(option: str) -> None:
    value, path, expected = ZEROS[option]
    request = inference_pb2.GenerateRequest.FromString(
        generate_request("hi", options(**{option: value})).SerializeToString()
    )
    assert has(request, path)
    if expected is not None:
        assert at(request, path) == expected


@pytest.mark.parametrize("option", OTHERS)
def test_each_option_reaches_its_field(option: str) -> None:
    value, path, expected = OTHERS[option]
    # The one that is about messages makes a conversation of the prompt.
    prompt = None if option == "omit_generation_prompt" else "hi"
    messages = [{"role": "user", "content": "hi"}] if prompt is None else None
    request = generate_request(prompt, options(**{option: value}, messages=messages))
    assert at(request, path) == expected
    constrained = option in ("json_schema", "json_object", "regex", "ebnf_grammar", "choices")
    assert request.HasField("constraint") == constrained


def test_a_single_stop_string_is_one_string() -> None:
    assert at(generate_request("hi", {"stop": "。\n"}), "stopping.stop_strings") == ["。\n"]


def test_prompts() -> None:
    assert generate_request("", {}).WhichOneof("prompt") == "text"
    assert generate_request([], {}).WhichOneof("prompt") == "token_ids"
    assert list(generate_request((3, 1, 2), {}).token_ids.ids) == [3, 1, 2]
    assert generate_request("\0\U0010ffff", {}).text == "\0\U0010ffff"


@given(st.floats(0, 1e9))
def test_a_time_limit_is_kept_to_the_microsecond(seconds: float) -> None:
    duration = generate_request("hi", {"time_limit": seconds}).stopping.time_limit
    assert duration.seconds + duration.nanos / 1e9 == pytest.approx(seconds, abs=1e-6, rel=1e-12)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_k": -1}, "sampling.top_k"),
    ({"top_k": 2**32}, "sampling.top_k"),
    ({"top_k": 1.5}, "sampling.top_k"),
    ({"temperature": "hot"}, "sampling.temperature"),
    ({"seed": -1}, "sampling.seed"),
    ({"seed": 2**64}, "sampling.seed"),
    ({"max_new_tokens": -1}, "stopping.max_new_tokens"),
    ({"stop": "\ud800"}, "stopping.stop_strings"),
    ({"stop": [1]}, "stopping.stop_strings"),
    ({"stop_token_ids": [-1]}, "stopping.stop_token_ids"),
    ({"stop_token_ids": 5}, "stopping.stop_token_ids"),
    ({"time_limit": float("nan")}, "stopping.time_limit"),
    ({"time_limit": float("inf")}, "stopping.time_limit"),
    ({"context": "rolling"}, "context.overflow"),
    ({"window_tokens": -1}, "context.window_tokens"),
    ({"delivery": 1}, "output.delivery_mode"),
    ({"request_id": 7}, "request_id"),
    ({"logit_bias": {-1: 1}}, "sampling.logit_bias"),
    ({"logit_bias": [1, 2]}, "sampling.logit_bias"),
    ({"choices": "abc"}, "constraint.choices.values"),
    ({"json_object": 1}, "constraint.json_object"),
    ({"json_schema": {"const": float("nan")}}, "constraint.json_schema"),
    ({"logprobs": -1}, "output.output_logprobs.top_count"),
    ({"n": 1.5}, "sampling.sequence_count"),
]


@pytest.mark.parametrize(("wrong", "path"), REFUSED)
def test_what_a_message_cannot_hold_is_named(wrong: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("hi", options(**wrong))
    assert [each.field for each in caught.value.violations] == [path]
    assert path in str(caught.value)


ACCEPTED: list[tuple[dict[str, Any], str]] = [
    ({"top_k": -1}, "-1 is not accepted; accepted: a whole number from 0 to 2147483647"),
    ({"seed": -1}, "-1 is not accepted; accepted: a whole number from 0 to 18446744073709551615"),
    ({"max_new_tokens": 1.5}, "1.5 is not accepted; accepted: a whole number from 0 to 4294967295"),
    ({"stop_token_ids": [-1]}, "[-1] is not accepted; accepted: a list, each a whole number from 0 to 4294967295"),
    ({"stop": [1]}, "[1] is not accepted; accepted: a list, each text"),
    ({"temperature": "hot"}, "'hot' is not accepted; accepted: a number in [0, 100]"),
    (
        {"time_limit": 1e300},
        "1e+300 is not accepted; accepted: a number of seconds in (0, 315576000000]",
    ),
    ({"context": "rolling"}, "'rolling' is not accepted; accepted: auto, reject, truncate, roll, reencode"),
    ({"delivery": 1}, "1 is not accepted; accepted: incremental, final"),
    ({"ignore_eos": "yes"}, "'yes' is not accepted; accepted: True or False"),
    ({"request_id": 7}, "7 is not accepted; accepted: text"),
]


@pytest.mark.parametrize(("wrong", "text"), ACCEPTED)
def test_what_is_accepted_instead_is_said(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("hi", options(**wrong))
    assert [each.description for each in caught.value.violations] == [text]


def test_ranges_are_the_servers() -> None:
    servers: dict[str, Option] = {
        **{f"sampling.{name}": option for name, option in SAMPLING.items()},
        "sampling.sequence_count": Integer(1, MAX_SEQUENCES),
        "priority": PRIORITY,
        "output.min_tokens_per_message": MIN_TOKENS_PER_MESSAGE,
    }
    assert {path: ACCEPTED_WORDS[path] for path in servers} == {path: each.accepts for path, each in servers.items()}


@pytest.mark.parametrize("option", [*ZEROS, *OTHERS])
def test_every_option_has_words_for_what_it_accepts(option: str) -> None:
    with pytest.raises(InvalidRequest, match="is not accepted; accepted: "):
        generate_request("hi", options(**{option: object()}))


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("\udcff", options(top_k=-1, seed=2**64, temperature=0.5))
    assert [each.field for each in caught.value.violations] == ["text", "sampling.top_k", "sampling.seed"]


def test_other_requests_name_their_fields_too() -> None:
    cases: list[tuple[Callable[[], Message], str]] = [
        (lambda: tokenize_request(["ok", "\ud800"], {}), "texts"),
        (lambda: detokenize_request([[1], [-1]], {}), "sequences[1].ids"),
        (lambda: model_request("\ud800"), "name"),
        (lambda: cancel_request("\ud800"), "request_id"),
    ]
    for build, path in cases:
        with pytest.raises(InvalidRequest) as caught:
            build()
        assert [each.field for each in caught.value.violations] == [path]


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'temprature'"):
        generate_request("hi", options(temprature=1))
    with pytest.raises(TypeError, match="tokenize"):
        tokenize_request(["hi"], {"keep": True})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="detokenize"):
        detokenize_request([[1]], {"return_tokens": True})  # type: ignore[typeddict-unknown-key]


def test_logprobs_of_the_token_alone_are_asked_for_by_a_zero() -> None:
    request = generate_request("hi", {"logprobs": 0, "prompt_logprobs": 0})
    assert request.output.HasField("output_logprobs")
    assert request.output.HasField("prompt_logprobs")
    assert not generate_request("hi", {"json_object": False}).HasField("constraint")


def test_messages_in_place_of_a_prompt() -> None:
    conversation = [{"role": "system", "content": ""}, {"role": "user", "content": "你好"}]
    request = generate_request(None, {"messages": conversation})
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", ""), ("user", "你好")]
    assert request.WhichOneof("prompt") == "chat"
    assert generate_request(None, {"messages": []}).WhichOneof("prompt") == "chat"
    for wrong in ("hello", [{"role": "user", "text": "x"}], [{"role": 1}], ["x"], [{"role": "u", "content": "\ud800"}]):
        with pytest.raises(InvalidRequest) as caught:
            generate_request(None, options(messages=wrong))
        assert [each.field for each in caught.value.violations] == ["chat.messages"]
    for prompt, messages in (("hi", conversation), (None, None)):
        with pytest.raises(TypeError, match="either a prompt or messages"):
            generate_request(prompt, options(messages=messages))


def test_constraints_exclude_each_other() -> None:
    with pytest.raises(TypeError, match="one constraint at most, not regex and choices"):
        generate_request("hi", {"regex": "a", "choices": ["b"], "json_object": False})


def test_look_alikes_are_type_errors() -> None:
    with pytest.raises(TypeError, match="not bytes"):
        generate_request(b"hi", {})
    with pytest.raises(TypeError, match="list of texts"):
        tokenize_request("hi", {})
