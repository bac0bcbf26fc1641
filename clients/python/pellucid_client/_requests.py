"""Request messages from Python values.

Owns the rule that what is unset is not sent, and that an explicit 0 is sent as 0. Ranges are the server's to check;
only what a message cannot hold at all (a negative count, text that is not Unicode) is refused here, in the same
form as the server's own refusal: InvalidRequest with every field named.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from pellucid.v1 import inference_pb2, model_pb2, tokenizer_pb2, types_pb2
from pellucid_client._fields import ACCEPTED, CONVERSIONS, FIELDS, TYPES
from pellucid_client._options import DetokenizeOptions, GenerateOptions, TokenizeOptions
from pellucid_client.errors import InvalidRequest, Violation

M = TypeVar("M", bound=Message)


CONSTRAINTS = ("json_schema", "json_object", "regex", "ebnf_grammar", "choices")


def generate_request(prompt: str | Sequence[int] | None, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequest for values that a message cannot hold, TypeError for an option that does not exist and for
    prompts or constraints that exclude each other.
    """
    _refuse_unknown("generate", options, GenerateOptions)
    if isinstance(prompt, bytes):
        raise TypeError("generate() takes a prompt of text or token ids, not bytes")
    if (prompt is None) == (options.get("messages") is None):
        raise TypeError("generate() takes either a prompt or messages")
    given = [name for name in CONSTRAINTS if options.get(name) not in (None, False)]
    if len(given) > 1:
        raise TypeError(f"generate() takes one constraint at most, not {' and '.join(given)}")
    wishes = [] if prompt is None else [_Wish("text" if isinstance(prompt, str) else "token_ids.ids", prompt)]
    for option, path in FIELDS.items():
        if (value := options.get(option)) is not None:
            wishes.append(_Wish(path, value, CONVERSIONS.get(option, _as_it_is)))
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


class _Wish(NamedTuple):
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


def _put(message: Message, path: str, value: Any) -> None:
    if value is None:
        return
    *parents, leaf = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
        message.SetInParent()  # Chosen even where nothing is put in, such as an empty list of token ids.
    field = getattr(message, leaf)
    if isinstance(value, Message):
        field.SetInParent()
        field.CopyFrom(value)
    elif hasattr(field, "extend"):
        field.extend(value)
    elif isinstance(field, MutableMapping):
        field.update(value)
    else:
        setattr(message, leaf, value)


def _accepted(message: Message, path: str) -> str:
    """What a field takes, in the server's words where those say more than its type."""
    if path in ACCEPTED:
        return ACCEPTED[path]
    *parents, leaf = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    words = TYPES[message.DESCRIPTOR.fields_by_name[leaf].type]
    return f"a list, each {words}" if hasattr(getattr(message, leaf), "extend") else words
