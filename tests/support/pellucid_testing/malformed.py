"""Requests that must be refused, each with the fields that its refusal must name."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from pellucid.v1 import inference_pb2, model_pb2, tokenizer_pb2, types_pb2
from pellucid_testing.calls import GENERATE, request

CANCEL = "/pellucid.v1.InferenceService/Cancel"
TOKENIZE = "/pellucid.v1.TokenizerService/Tokenize"
DETOKENIZE = "/pellucid.v1.TokenizerService/Detokenize"
GET_MODEL = "/pellucid.v1.ModelService/GetModel"
GET_LOAD = "/pellucid.v1.ServerService/GetLoad"

NOT_UTF8 = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"ok\xe4\xbd", b"\xf5\x80\x80\x80")
NEVER = (math.nan, math.inf, -math.inf)
UINT32 = 2**32 - 1


@dataclass(frozen=True)
class Case:
    """`fields`: exactly those that the answer names; None: the whole message, whatever is found in it."""

    raw: bytes
    fields: frozenset[str] | None
    code: str = "INVALID_ARGUMENT"
    reason: str = "INVALID_FIELD"
    method: str = GENERATE
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Limits:
    """What decides where the edges are."""

    vocab_size: int
    context: int
    max_new_tokens: int
    default_max_new_tokens: int
    unknown_character: str
    """Which the tokenizer has no token for, not even a common one."""


def cases(limits: Limits) -> list[Case]:
    """All of them."""
    return [
        *_numbers(limits),
        *_stops(limits),
        *_biases(limits),
        *_logprobs(limits),
        *_constraints(),
        *_chats(),
        *_prompts(limits),
        *_contexts(limits),
        *_options(),
        *_unknown_fields(),
        *_texts_that_are_not(),
        *_bytes_that_are_no_message(),
        *_several_at_once(limits),
        *_other_methods(limits),
    ]


def _case(message: Message, *fields: str, reason: str = "INVALID_FIELD", **other: Any) -> Case:
    return Case(message.SerializeToString(), frozenset(fields), reason=reason, **other)


def _numbers(limits: Limits) -> Iterator[Case]:
    sampling: dict[str, tuple[float, ...]] = {
        "temperature": (*NEVER, -1e-6, -1.0, 100.01, 3e38),
        "top_p": (*NEVER, 0.0, -0.0, -0.5, 1.000001, 2.0),
        "min_p": (*NEVER, -0.1, 1.0, 1.5),
        "top_k": (2**31, UINT32),
        "typical_p": (*NEVER, 0.0, -0.5, 1.000001, 3e38),
        "repetition_penalty": (*NEVER, 0.0, -1.0, 0.0099, 100.1, 1e30),
        "presence_penalty": (*NEVER, -2.01, 2.01, 1e30),
        "frequency_penalty": (*NEVER, -2.01, 2.01, 1e30),
        "sequence_count": (0, 65, UINT32),
    }
    for name, values in sampling.items():
        for value in values:
            yield _case(request(sampling={name: value}), f"sampling.{name}")
    for priority in (-101, 101, 2**31 - 1, -(2**31)):
        yield _case(request(priority=priority), "priority")
    for value in (limits.max_new_tokens + 1, 2**31, UINT32):
        yield _case(request(stopping={"max_new_tokens": value}), "stopping.max_new_tokens")
    for least, most in ((6, 5), (1, 0), (UINT32, 5), (UINT32, limits.max_new_tokens)):
        stopping = {"min_new_tokens": least, "max_new_tokens": most}
        yield _case(request(stopping=stopping), "stopping.min_new_tokens")
    stopping = {"min_new_tokens": limits.default_max_new_tokens + 1}
    yield _case(request(stopping=stopping), "stopping.min_new_tokens")
    for seconds, nanos in ((0, 0), (-1, 0), (0, -1), (1, -1), (-1, 1), (0, 10**9), (2**62, 0), (-(2**62), 0)):
        duration = {"seconds": seconds, "nanos": nanos}
        yield _case(request(stopping={"time_limit": duration}), "stopping.time_limit")
    for count in (0, 257, 2**31, UINT32):
        yield _case(request(output={"min_tokens_per_message": count}), "output.min_tokens_per_message")


def _stops(limits: Limits) -> Iterator[Case]:
    for texts, index in (([""], 0), (["ok", ""], 1), (["x" * 1025], 0), (["天" * 342], 0), (["a", "b", "x" * 9999], 2)):
        yield _case(request(stopping={"stop_strings": texts}), f"stopping.stop_strings[{index}]")
    for count in (33, 5000):
        yield _case(request(stopping={"stop_strings": ["x"] * count}), "stopping.stop_strings")
    for ids, index in (([limits.vocab_size], 0), ([UINT32], 0), ([0, 1, limits.vocab_size], 2), ([5, 2**31], 1)):
        yield _case(request(stopping={"stop_token_ids": ids}), f"stopping.stop_token_ids[{index}]")
    for count in (257, 5000):
        yield _case(request(stopping={"stop_token_ids": [1] * count}), "stopping.stop_token_ids")


def _biases(limits: Limits) -> Iterator[Case]:
    size = limits.vocab_size
    for token_id, bias in ((size, 1.0), (UINT32, 1.0), *((3, value) for value in (*NEVER, 1e38, -100.1, 101.0))):
        yield _case(request(sampling={"logit_bias": {token_id: bias}}), f"sampling.logit_bias[{token_id}]")
    many = dict.fromkeys(range(1025), 1.0)
    yield _case(request(sampling={"logit_bias": many}), "sampling.logit_bias")
    yield _case(request(sampling={"allowed_token_ids": [1, size]}), "sampling.allowed_token_ids[1]")
    yield _case(request(sampling={"allowed_token_ids": [1] * 4097}), "sampling.allowed_token_ids")


def _logprobs(limits: Limits) -> Iterator[Case]:
    size = limits.vocab_size
    for name in ("output_logprobs", "prompt_logprobs"):
        for count in (21, size + 1, 10**6, UINT32):
            yield _case(request(output={name: {"top_count": count}}), f"output.{name}.top_count")
        yield _case(request(output={name: {"token_ids": [size]}}), f"output.{name}.token_ids[0]")
        yield _case(request(output={name: {"token_ids": [1] * 65}}), f"output.{name}.token_ids")
    yield _case(request(output={"output_logprobs": {"start_position": 1}}), "output.output_logprobs.start_position")
    for start in (3, UINT32):
        wish = {"prompt_logprobs": {"start_position": start}}
        yield _case(request([1, 2, 3], output=wish), "output.prompt_logprobs.start_position")
    yield _case(request(cache={"salt": "x" * 257}), "cache.salt")


def _constraints() -> Iterator[Case]:
    yield _case(request(constraint={}), "constraint")
    for field in ("json_schema", "regex", "ebnf_grammar"):
        for text in ("", "x" * 65537):
            yield _case(request(constraint={field: text}), f"constraint.{field}")
    for values, path in (([], ""), ([""], "[0]"), (["a", "b" * 4097], "[1]"), (["a"] * 1025, "")):
        yield _case(request(constraint={"choices": {"values": values}}), f"constraint.choices.values{path}")


def _chats() -> Iterator[Case]:
    """Of a model without a chat template: that is told before anything else of them."""
    message = {"role": "user", "content": "hi"}
    chat = inference_pb2.Chat(messages=[message])
    yield _case(inference_pb2.GenerateRequest(chat=chat), "chat", reason="UNSUPPORTED_FIELD")
    for role in ("", "a b", "<s>", "x" * 65, "天"):
        wrong = inference_pb2.Chat(messages=[message, {"role": role, "content": ""}])
        fields = ("chat", "chat.messages[1].role")
        yield _case(inference_pb2.GenerateRequest(chat=wrong), *fields, reason="UNSUPPORTED_FIELD")
    for count in (0, 1025):
        wrong = inference_pb2.Chat(messages=[message] * count)
        fields = ("chat", "chat.messages")
        yield _case(inference_pb2.GenerateRequest(chat=wrong), *fields, reason="UNSUPPORTED_FIELD")
    for option in ("omit_special_tokens", "parse_special_tokens"):
        wrong_option: Any = {option: True}
        whole = inference_pb2.GenerateRequest(chat=chat, **wrong_option)
        yield _case(whole, "chat", option, reason="UNSUPPORTED_FIELD")


def _prompts(limits: Limits) -> Iterator[Case]:
    yield _case(inference_pb2.GenerateRequest(), "prompt")
    yield _case(inference_pb2.GenerateRequest(request_id="r", model=""), "prompt")
    yield _case(request("", omit_special_tokens=True), "text")
    yield _case(request([]), "token_ids.ids")
    for ids, index in (([limits.vocab_size], 0), ([UINT32], 0), ([1] * 20 + [limits.vocab_size], 20)):
        yield _case(request(ids), f"token_ids.ids[{index}]")
    yield _case(request([1] * 200_000 + [2**31]), "token_ids.ids[200000]")
    for length in (limits.context, limits.context + 1, 20 * limits.context):
        policy = inference_pb2.ContextPolicy(overflow=inference_pb2.CONTEXT_OVERFLOW_REJECT)
        yield _case(request([1] * length, context=policy), "token_ids.ids", reason="PROMPT_TOO_LONG")
        yield _case(request("a" * length, context=policy), "text", reason="PROMPT_TOO_LONG")
    yield _case(request("ab" + limits.unknown_character), "text")
    yield _case(request([1], omit_special_tokens=True), "omit_special_tokens")
    yield _case(request([1], parse_special_tokens=True), "parse_special_tokens")
    for name in ("x" * 129, "天" * 43, "x" * 100_000):
        yield _case(request(request_id=name), "request_id")
    yield _case(request(), "x-request-id", metadata=(("x-request-id", "x" * 129),))
    for name in ("nobody", "天地" * 10, "x" * 100_000, "../tiny"):
        yield _case(request(model=name), code="NOT_FOUND", reason="MODEL_NOT_FOUND")


def _contexts(limits: Limits) -> Iterator[Case]:
    policy, n = inference_pb2.ContextPolicy, limits.context
    for overflow in (6, 99, -1, 2**31 - 1):
        unknown: Any = overflow
        yield _case(request(context=policy(overflow=unknown)), "context.overflow", reason="UNSUPPORTED_FIELD")
    reject, roll = inference_pb2.CONTEXT_OVERFLOW_REJECT, inference_pb2.CONTEXT_OVERFLOW_ROLL
    reencode = inference_pb2.CONTEXT_OVERFLOW_REENCODE
    for sliding in (roll, reencode):
        for window in (0, n + 1, UINT32):
            yield _case(request(context=policy(overflow=sliding, window_tokens=window)), "context.window_tokens")
        for sinks in (n, UINT32):
            yield _case(request(context=policy(overflow=sliding, sink_tokens=sinks)), "context.sink_tokens")
        both = policy(overflow=sliding, window_tokens=n - 1, sink_tokens=2)
        yield _case(request(context=both), "context.window_tokens")
    for hop in (0, n + 1, UINT32):
        yield _case(request(context=policy(overflow=reencode, hop_tokens=hop)), "context.hop_tokens")
    yield _case(request(context=policy(overflow=reencode, window_tokens=8, hop_tokens=9)), "context.hop_tokens")
    yield _case(request(context=policy(overflow=roll, hop_tokens=3)), "context.hop_tokens")
    for name in ("window_tokens", "sink_tokens", "hop_tokens"):
        yield _case(request(context=policy(overflow=reject, **{name: 3})), f"context.{name}")


def _options() -> Iterator[Case]:
    for mode in (3, 99, -1, 2**31 - 1):
        raw = request(output={"delivery_mode": mode})
        yield _case(raw, "output.delivery_mode", reason="UNSUPPORTED_FIELD")


def _unknown_fields() -> Iterator[Case]:
    whole = request().SerializeToString()
    for number in (13, 16, 17, 99, 1000, 2**29 - 1):
        path = frozenset((f"field {number}",))
        for wire_type, content in ((0, b"\x01"), (2, b"\x02hi"), (5, b"1234"), (1, b"12345678")):
            yield Case(whole + _key(number, wire_type) + content, path, reason="UNSUPPORTED_FIELD")
    nested = {7: "sampling", 8: "stopping", 9: "constraint", 10: "output", 11: "cache", 12: "context"}
    for number, name in nested.items():
        for inner in (60, 2**20):
            part = _bytes_field(number, _key(inner, 0) + b"\x01")
            yield Case(whole + part, frozenset((f"{name}.field {inner}",)), reason="UNSUPPORTED_FIELD")
    deep = _bytes_field(8, _bytes_field(7, b"\x08\x01" + _key(9, 0) + b"\x01"))
    yield Case(whole + deep, frozenset(("stopping.time_limit.field 9",)), reason="UNSUPPORTED_FIELD")
    ids = _bytes_field(4, b"\x0a\x01\x01" + _key(2, 0) + b"\x01")
    yield Case(ids, frozenset(("token_ids.field 2",)), reason="UNSUPPORTED_FIELD")
    # A known number with another wire type is another field: text as a number, temperature as text.
    yield Case(_key(3, 0) + b"\x05", frozenset(("field 3",)), reason="UNSUPPORTED_FIELD")
    other = _bytes_field(7, _bytes_field(1, b"hot"))
    yield Case(whole + other, frozenset(("sampling.field 1",)), reason="UNSUPPORTED_FIELD")


def _texts_that_are_not() -> Iterator[Case]:
    whole = request().SerializeToString()
    for bad in NOT_UTF8:
        yield Case(_bytes_field(3, bad), frozenset(("text",)))
        yield Case(whole + _bytes_field(1, bad), frozenset(("request_id",)))
        yield Case(whole + _bytes_field(2, bad), frozenset(("model",)))
        salt = _bytes_field(11, _bytes_field(3, bad))
        yield Case(whole + salt, frozenset(("cache.salt",)))
        regex = _bytes_field(9, _bytes_field(3, bad))
        yield Case(whole + regex, frozenset(("constraint.regex",)))
        content = _bytes_field(1, _bytes_field(1, b"user") + _bytes_field(2, bad))
        yield Case(_bytes_field(5, content), frozenset(("chat.messages[0].content",)))
        stops = _bytes_field(8, _bytes_field(3, b"fine") + _bytes_field(3, bad))
        yield Case(whole + stops, frozenset(("stopping.stop_strings[1]",)))


def _bytes_that_are_no_message() -> Iterator[Case]:
    for raw in (
        b"\xff",
        b"\x00\x01",
        b"\x1a\x05ab",
        b"\x0f",
        b"\x1e\x01",
        b"\x1a" + b"\xff" * 11,
        b"\x12",
        b"\x3a\x02\x0d",
    ):
        yield Case(raw, None)
    rng = random.Random(7)
    for _ in range(20):
        # Wire type 7 does not exist, so that chance cannot make a message of it.
        yield Case(b"\x07" + rng.randbytes(rng.randrange(1, 200)), None)
    cut = request("hello", stopping={"stop_strings": ["abc"]}, sampling={"temperature": 0.5}).SerializeToString()
    for length in range(1, 7):
        yield Case(cut[:length], None)


def _several_at_once(limits: Limits) -> Iterator[Case]:
    yield _case(
        request(
            [],
            request_id="x" * 200,
            sampling={"temperature": math.nan, "top_p": 0.0, "min_p": 1.0, "top_k": UINT32},
            stopping={"max_new_tokens": UINT32, "stop_strings": [""], "stop_token_ids": [limits.vocab_size]},
            output={"min_tokens_per_message": 0},
            parse_special_tokens=True,
        ),
        *(
            "request_id",
            "parse_special_tokens",
            "sampling.temperature",
            "sampling.top_p",
            "sampling.min_p",
            "sampling.top_k",
        ),
        *("stopping.max_new_tokens", "stopping.stop_strings[0]", "stopping.stop_token_ids[0]"),
        "output.min_tokens_per_message",
    )
    mixed = request(sampling={"top_p": 2.0}, output={"delivery_mode": 9})
    yield _case(mixed, "sampling.top_p", "output.delivery_mode", reason="UNSUPPORTED_FIELD")


def _other_methods(limits: Limits) -> Iterator[Case]:
    yield _case(inference_pb2.CancelRequest(), "request_id", method=CANCEL)
    yield Case(_bytes_field(1, b"\xff"), frozenset(("request_id",)), method=CANCEL)
    unknown = frozenset(("field 9",))
    for method in (CANCEL, TOKENIZE, DETOKENIZE, GET_MODEL, GET_LOAD):
        yield Case(_key(9, 0) + b"\x01", unknown, reason="UNSUPPORTED_FIELD", method=method)
        yield Case(b"\xff", None, method=method)
    yield _case(tokenizer_pb2.TokenizeRequest(texts=["x"] * 1025), "texts", method=TOKENIZE)
    texts = ["a", limits.unknown_character]
    yield _case(tokenizer_pb2.TokenizeRequest(texts=texts), "texts[1]", method=TOKENIZE)
    yield Case(_bytes_field(2, b"a") + _bytes_field(2, b"\xff"), frozenset(("texts[1]",)), method=TOKENIZE)
    good, bad = types_pb2.TokenIds(ids=[1]), types_pb2.TokenIds(ids=[1, limits.vocab_size])
    ids = tokenizer_pb2.DetokenizeRequest(sequences=[good, bad])
    yield _case(ids, "sequences[1].ids[1]", method=DETOKENIZE)
    many = tokenizer_pb2.DetokenizeRequest(sequences=[good] * 1025)
    yield _case(many, "sequences", method=DETOKENIZE)
    for method, message in (
        (TOKENIZE, tokenizer_pb2.TokenizeRequest(model="nobody", texts=["a"])),
        (DETOKENIZE, tokenizer_pb2.DetokenizeRequest(model="nobody")),
        (GET_MODEL, model_pb2.GetModelRequest(name="nobody")),
    ):
        yield _case(message, method=method, code="NOT_FOUND", reason="MODEL_NOT_FOUND")


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _bytes_field(number: int, content: bytes) -> bytes:
    return _key(number, 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
