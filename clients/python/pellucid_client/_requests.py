"""Request messages from Python values.

Owns the rule that what is unset is not sent, and that an explicit 0 is sent as 0. Ranges are the server's to check;
only what a message cannot hold at all (a negative count, text that is not Unicode) is refused here, in the same
form as the server's own refusal: InvalidRequest with every field named.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from pellucid.v1 import inference_pb2, model_pb2, tokenizer_pb2, types_pb2
from pellucid_client.errors import InvalidRequest, Violation

M = TypeVar("M", bound=Message)


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`. Left out or None: the server's default, which `stream.prompt` then shows."""

    model: str | None
    """Name of the model; needed only where the server has several."""
    request_id: str | None
    """Your own name for the request, unique among those in flight; `cancel` takes it."""
    temperature: float | None
    """[0, 100]; 0 = greedy."""
    top_k: int | None
    """Keep the k most likely tokens; 0 = off."""
    top_p: float | None
    """(0, 1]; 1 = off."""
    min_p: float | None
    """[0, 1); 0 = off."""
    seed: int | None
    """[0, 2^64); the same request with the same seed gives the same tokens."""
    max_new_tokens: int | None
    """0 = only run the prompt."""
    min_new_tokens: int | None
    """No end before this many tokens."""
    stop: str | Sequence[str] | None
    """Stop strings, matched on the output's text."""
    stop_token_ids: Sequence[int] | None
    include_stop_in_text: bool | None
    ignore_eos: bool | None
    """Go on past the model's end tokens."""
    time_limit: float | None
    """Seconds from admission; the stream then ends well, with finish "time_limit"."""
    context: Literal["auto", "reject", "truncate", "roll", "reencode"] | None
    """What happens when prompt and output pass the trained context: docs/windows.md."""
    window_tokens: int | None
    """Under "roll" and "reencode": newest tokens that stay visible, at least 1."""
    sink_tokens: int | None
    """Under "roll" and "reencode": first tokens that stay visible for ever."""
    hop_tokens: int | None
    """Under "reencode": tokens dropped at a time, at most the window."""
    omit_special_tokens: bool | None
    """Text prompts: do not add BOS and the like."""
    parse_special_tokens: bool | None
    """Text prompts: spellings of special tokens become those tokens."""
    keep_special_tokens: bool | None
    """Leave special tokens in the text."""
    omit_text: bool | None
    omit_token_ids: bool | None
    return_prompt_token_ids: bool | None
    delivery: Literal["incremental", "final"] | None
    """"final": one message at the end."""
    min_tokens_per_message: int | None
    """[1, 256]; tokens to gather before a message is sent."""
    timeout: float | None
    """Seconds, greater than 0; then DeadlineExceeded."""


class TokenizeOptions(TypedDict, total=False):
    """Keyword arguments of `tokenize`."""

    model: str | None
    omit_special_tokens: bool | None
    """Do not add BOS and the like."""
    parse_special_tokens: bool | None
    """Spellings of special tokens in the text become those tokens."""
    return_tokens: bool | None
    """Also the bytes that each token stands for."""
    timeout: float | None
    """Seconds; then DeadlineExceeded."""


class DetokenizeOptions(TypedDict, total=False):
    """Keyword arguments of `detokenize`."""

    model: str | None
    keep_special_tokens: bool | None
    """Leave special tokens in the text."""
    timeout: float | None
    """Seconds; then DeadlineExceeded."""


def generate_request(prompt: str | Sequence[int], options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequest for values that a message cannot hold, TypeError for an option that does not exist."""
    _refuse_unknown("generate", options, GenerateOptions)
    if isinstance(prompt, bytes):
        raise TypeError("generate() takes a prompt of text or token ids, not bytes")
    wishes = [_Wish("text" if isinstance(prompt, str) else "token_ids.ids", prompt)]
    for option, path in _FIELDS.items():
        if (value := options.get(option)) is not None:
            wishes.append(_Wish(path, value, _CONVERSIONS.get(option, _as_it_is)))
    return _filled(inference_pb2.GenerateRequest(), wishes)


def tokenize_request(texts: Sequence[str], options: TokenizeOptions) -> tokenizer_pb2.TokenizeRequest:
    _refuse_unknown("tokenize", options, TokenizeOptions)
    if isinstance(texts, str):
        raise TypeError("tokenize_batch() takes a list of texts; tokenize() takes one")
    return _filled(tokenizer_pb2.TokenizeRequest(), [_Wish("texts", texts), *_plain_wishes(options)])


def detokenize_request(
    sequences: Sequence[Sequence[int]], options: DetokenizeOptions
) -> tokenizer_pb2.DetokenizeRequest:
    _refuse_unknown("detokenize", options, DetokenizeOptions)
    filled = [_filled(types_pb2.TokenIds(), [_Wish("ids", ids)], f"sequences[{i}].") for i, ids in enumerate(sequences)]
    return _filled(tokenizer_pb2.DetokenizeRequest(), [_Wish("sequences", filled), *_plain_wishes(options)])


def model_request(name: str | None) -> model_pb2.GetModelRequest:
    return _filled(model_pb2.GetModelRequest(), [_Wish("name", name or "")])


def cancel_request(request_id: str) -> inference_pb2.CancelRequest:
    return _filled(inference_pb2.CancelRequest(), [_Wish("request_id", request_id)])


def _refuse_unknown(function: str, options: Mapping[str, object], known: type) -> None:
    if unknown := options.keys() - known.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {min(unknown)!r}")


def _plain_wishes(options: Mapping[str, object]) -> list[_Wish]:
    """Options that are fields of the same name."""
    return [_Wish(name, value) for name, value in options.items() if name != "timeout" and value is not None]


def _as_it_is(value: object) -> object:
    return value


@dataclass(frozen=True)
class _Wish:
    """A value for the field at `path`; `convert` turns it into what the field holds."""

    path: str
    value: object
    convert: Callable[[Any], object] = _as_it_is


def _filled(message: M, wishes: Sequence[_Wish], prefix: str = "") -> M:
    """Sets every wish, or raises InvalidRequest that names each one that cannot be set."""
    violations = []
    for wish in wishes:
        try:
            _put(message, wish.path, wish.convert(wish.value))
        except UnicodeEncodeError as error:
            violations.append(
                Violation(prefix + wish.path, f"not Unicode text: {error.reason}, at character {error.start}")
            )
        except (TypeError, ValueError, OverflowError):
            text = f"{reprlib.repr(wish.value)} is not accepted; accepted: {_accepted(message, wish.path)}"
            violations.append(Violation(prefix + wish.path, text))
    if violations:
        raise InvalidRequest(
            "; ".join(map(str, violations)),
            code=grpc.StatusCode.INVALID_ARGUMENT,
            reason="INVALID_FIELD",
            violations=tuple(violations),
        )
    return message


def _put(message: Message, path: str, value: object) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
        message.SetInParent()  # Chosen even where nothing is put in, such as an empty list of token ids.
    field = getattr(message, leaf)
    if isinstance(value, Duration):
        field.SetInParent()
        field.CopyFrom(value)
    elif hasattr(field, "extend"):
        field.extend(value)
    else:
        setattr(message, leaf, value)


def _accepted(message: Message, path: str) -> str:
    """What a field takes, in the server's words where those say more than its type."""
    if path in _ACCEPTED:
        return _ACCEPTED[path]
    *parents, leaf = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    words = _TYPES[message.DESCRIPTOR.fields_by_name[leaf].type]
    return f"a list, each {words}" if hasattr(getattr(message, leaf), "extend") else words


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
_FIELDS = {
    "model": "model",
    "request_id": "request_id",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "seed": "sampling.seed",
    "max_new_tokens": "stopping.max_new_tokens",
    "min_new_tokens": "stopping.min_new_tokens",
    "stop": "stopping.stop_strings",
    "stop_token_ids": "stopping.stop_token_ids",
    "include_stop_in_text": "stopping.include_stop_in_text",
    "ignore_eos": "stopping.ignore_eos",
    "time_limit": "stopping.time_limit",
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
    "delivery": "output.delivery_mode",
    "min_tokens_per_message": "output.min_tokens_per_message",
}
_TYPES = {
    FieldDescriptor.TYPE_UINT32: "a whole number from 0 to 4294967295",
    FieldDescriptor.TYPE_UINT64: "a whole number from 0 to 18446744073709551615",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "text",
}
_ACCEPTED = {
    "sampling.temperature": "a number in [0, 100]",
    "sampling.top_k": "a whole number from 0 to 2147483647",
    "sampling.top_p": "a number in (0, 1]",
    "sampling.min_p": "a number in [0, 1)",
    "stopping.time_limit": "a number of seconds from 0 to 315576000000",
    "context.overflow": ", ".join(_CONTEXTS),
    "output.delivery_mode": ", ".join(_DELIVERIES),
    "output.min_tokens_per_message": "a whole number from 1 to 256",
}
# Options whose values are not what the field holds.
_CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "stop": _strings,
    "time_limit": _duration,
    "context": _one_of(_CONTEXTS),
    "delivery": _one_of(_DELIVERIES),
}
