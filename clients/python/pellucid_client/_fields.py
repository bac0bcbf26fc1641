"""Where each option of `generate` goes in a GenerateRequest, and what its field accepts, in the server's words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration

from pellucid.v1 import inference_pb2


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _strings(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _one_of(choices: dict[str, int]) -> Callable[[str], int]:
    def convert(value: str) -> int:
        if value not in choices:
            raise ValueError
        return choices[value]

    return convert


def _chat_messages(messages: Sequence[Mapping[str, str]]) -> list[inference_pb2.ChatMessage]:
    return [inference_pb2.ChatMessage(**message) for message in messages]


def _json_text(schema: str | Mapping[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)


def _choices(values: Sequence[str]) -> Sequence[str]:
    if isinstance(values, str):  # Each of its characters would be a choice.
        raise TypeError
    return values


def _json_object(wanted: bool) -> inference_pb2.JsonObject | None:
    if not isinstance(wanted, bool):
        raise TypeError
    return inference_pb2.JsonObject() if wanted else None


_CONTEXTS: dict[str, int] = {
    "auto": inference_pb2.CONTEXT_OVERFLOW_AUTO,
    "reject": inference_pb2.CONTEXT_OVERFLOW_REJECT,
    "truncate": inference_pb2.CONTEXT_OVERFLOW_TRUNCATE,
    "roll": inference_pb2.CONTEXT_OVERFLOW_ROLL,
    "reencode": inference_pb2.CONTEXT_OVERFLOW_REENCODE,
}
_DELIVERIES: dict[str, int] = {
    "incremental": inference_pb2.DELIVERY_MODE_INCREMENTAL,
    "final": inference_pb2.DELIVERY_MODE_FINAL,
}
# Option of `generate` -> its field in GenerateRequest.
FIELDS = {
    "model": "model",
    "request_id": "request_id",
    "messages": "chat.messages",
    "omit_generation_prompt": "chat.omit_generation_prompt",
    "priority": "priority",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "typical_p": "sampling.typical_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "logit_bias": "sampling.logit_bias",
    "allowed_token_ids": "sampling.allowed_token_ids",
    "n": "sampling.sequence_count",
    "seed": "sampling.seed",
    "max_new_tokens": "stopping.max_new_tokens",
    "min_new_tokens": "stopping.min_new_tokens",
    "stop": "stopping.stop_strings",
    "stop_token_ids": "stopping.stop_token_ids",
    "include_stop_in_text": "stopping.include_stop_in_text",
    "ignore_eos": "stopping.ignore_eos",
    "time_limit": "stopping.time_limit",
    "json_schema": "constraint.json_schema",
    "json_object": "constraint.json_object",
    "regex": "constraint.regex",
    "ebnf_grammar": "constraint.ebnf_grammar",
    "choices": "constraint.choices.values",
    "context": "context.overflow",
    "window_tokens": "context.window_tokens",
    "sink_tokens": "context.sink_tokens",
    "hop_tokens": "context.hop_tokens",
    "omit_special_tokens": "omit_special_tokens",
    "parse_special_tokens": "parse_special_tokens",
    "keep_special_tokens": "output.keep_special_tokens",
    "omit_text": "output.omit_text",
    "omit_token_ids": "output.omit_token_ids",
    "return_prompt_token_ids": "output.return_prompt_token_ids",
    "logprobs": "output.output_logprobs.top_count",
    "logprob_token_ids": "output.output_logprobs.token_ids",
    "prompt_logprobs": "output.prompt_logprobs.top_count",
    "prompt_logprob_token_ids": "output.prompt_logprobs.token_ids",
    "prompt_logprobs_start": "output.prompt_logprobs.start_position",
    "bypass_cache_read": "cache.bypass_read",
    "bypass_cache_write": "cache.bypass_write",
    "cache_salt": "cache.salt",
    "delivery": "output.delivery_mode",
    "min_tokens_per_message": "output.min_tokens_per_message",
}
TYPES = {
    FieldDescriptor.TYPE_UINT32: "a whole number from 0 to 4294967295",
    FieldDescriptor.TYPE_UINT64: "a whole number from 0 to 18446744073709551615",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "text",
}
ACCEPTED = {
    "sampling.temperature": "a number in [0, 100]",
    "sampling.top_k": "a whole number from 0 to 2147483647",
    "sampling.top_p": "a number in (0, 1]",
    "sampling.min_p": "a number in [0, 1)",
    "sampling.typical_p": "a number in (0, 1]",
    "sampling.repetition_penalty": "a number in [0.01, 100]",
    "sampling.presence_penalty": "a number in [-2, 2]",
    "sampling.frequency_penalty": "a number in [-2, 2]",
    "sampling.logit_bias": "a mapping of token ids to numbers in [-100, 100]",
    "sampling.sequence_count": "a whole number from 1 to 64",
    "priority": "a whole number from -100 to 100",
    "chat.messages": 'a list of {"role": text, "content": text}',
    "constraint.json_schema": "a JSON Schema, as text or as a mapping",
    "constraint.json_object": "True or False",
    "stopping.time_limit": "a number of seconds in (0, 315576000000]",
    "context.overflow": ", ".join(_CONTEXTS),
    "output.delivery_mode": ", ".join(_DELIVERIES),
    "output.min_tokens_per_message": "a whole number from 1 to 256",
}
# Options whose values are not what the field holds.
CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "stop": _strings,
    "time_limit": _duration,
    "context": _one_of(_CONTEXTS),
    "delivery": _one_of(_DELIVERIES),
    "messages": _chat_messages,
    "choices": _choices,
    "json_schema": _json_text,
    "json_object": _json_object,
}
