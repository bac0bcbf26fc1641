"""A GenerateRequest's values against what is accepted, all violations in one answer, and the defaults filled in.

Ranges are stated as what is accepted, so that NaN is refused; presence is asked for, never truth, so that 0 is a value.
Everything that needs no tokens is checked here; `planning` checks the prompt's length once it is tokenized.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from pellucid.v1 import inference_pb2
from pellucid_server.chat import Message
from pellucid_server.delivery import DeliveryRules
from pellucid_server.errors import ModelNotFound
from pellucid_server.options import Integer
from pellucid_server.planning import ContextWish, Wishes, check_room
from pellucid_server.rpc.validation_options import validated_options
from pellucid_server.rpc.validation_sampling import validated_sampling, validated_sequence_count
from pellucid_server.rpc.violations import Violations
from pellucid_server.served import ServedModel

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_BYTES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 256
MIN_TOKENS_PER_MESSAGE = Integer(1, 256)
MAX_CHAT_MESSAGES = 1024
ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")

PROMPT_FIELDS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
"""What a prompt is called in messages, by its member of the oneof."""

_OVERFLOWS: dict[int, str | None] = {
    inference_pb2.CONTEXT_OVERFLOW_UNSPECIFIED: None,
    inference_pb2.CONTEXT_OVERFLOW_AUTO: "auto",
    inference_pb2.CONTEXT_OVERFLOW_REJECT: "reject",
    inference_pb2.CONTEXT_OVERFLOW_TRUNCATE: "truncate",
    inference_pb2.CONTEXT_OVERFLOW_ROLL: "roll",
    inference_pb2.CONTEXT_OVERFLOW_REENCODE: "reencode",
}
_DELIVERY_MODES = (
    inference_pb2.DELIVERY_MODE_UNSPECIFIED,
    inference_pb2.DELIVERY_MODE_INCREMENTAL,
    inference_pb2.DELIVERY_MODE_FINAL,
)


@dataclass(frozen=True)
class GenerateSpec:
    """A valid request with every default filled in. Exactly one of `text`, `token_ids` and `chat` is set."""

    text: str | None
    token_ids: list[int] | None
    chat: tuple[Message, ...] | None
    open_answer: bool
    """With `chat`: whether the prompt goes on to the beginning of the assistant's turn."""
    add_special_tokens: bool
    parse_special_tokens: bool
    wishes: Wishes
    sequence_count: int
    stop_strings: tuple[str, ...]
    include_stop_in_text: bool
    time_limit: float | None
    rules: DeliveryRules
    keep_special_tokens: bool
    return_prompt_token_ids: bool


def check_model_name(name: str, model: ServedModel) -> None:
    """Empty means the only one loaded. Raises ModelNotFound."""
    if name and name != model.name:
        shown = name if len(name) <= 64 else name[:64] + "…"
        raise ModelNotFound(f"model {shown!r} is not served here; this server serves {model.name!r}")


def validate_generate(request: inference_pb2.GenerateRequest, model: ServedModel, header_id: str = "") -> GenerateSpec:
    """Raises InvalidRequest or UnsupportedField with every violation, ModelNotFound, or what check_room raises.

    `header_id` is the caller's x-request-id, which names the request where it has no id of its own.
    """
    check_model_name(request.model, model)
    violations = Violations()
    _check_request_id(violations, request.request_id, header_id)
    prompt = request.WhichOneof("prompt") or ""
    token_ids = request.token_ids.ids[:] if prompt == "token_ids" else None
    _check_prompt(violations, request, token_ids or [], model)
    wishes = Wishes(
        prompt_field=PROMPT_FIELDS.get(prompt, "prompt"),
        sampling=validated_sampling(violations, request.sampling, model),
        max_new_tokens=_max_new_tokens(violations, request.stopping, model),
        min_new_tokens=request.stopping.min_new_tokens,
        stop_ids=tuple(request.stopping.stop_token_ids),
        ignore_eos=request.stopping.ignore_eos,
        context=_context(violations, request.context, model),
        options=validated_options(violations, request, model),
        end_ids=model.chat.end_ids if prompt == "chat" and model.chat is not None else (),
    )
    _check_stopping(violations, request.stopping, wishes.max_new_tokens, model)
    spec = GenerateSpec(
        text=request.text if prompt == "text" else None,
        token_ids=token_ids,
        chat=tuple((each.role, each.content) for each in request.chat.messages) if prompt == "chat" else None,
        open_answer=not request.chat.omit_generation_prompt,
        add_special_tokens=not request.omit_special_tokens,
        parse_special_tokens=request.parse_special_tokens,
        wishes=wishes,
        sequence_count=validated_sequence_count(violations, request.sampling, model),
        stop_strings=tuple(request.stopping.stop_strings),
        include_stop_in_text=request.stopping.include_stop_in_text,
        time_limit=_time_limit(violations, request.stopping),
        rules=_delivery_rules(violations, request.output),
        keep_special_tokens=request.output.keep_special_tokens,
        return_prompt_token_ids=request.output.return_prompt_token_ids,
    )
    violations.raise_any()
    if spec.token_ids is not None and wishes.context.overflow == "reject":
        check_room(model, wishes, len(spec.token_ids))
    return spec


def _check_request_id(violations: Violations, own: str, header_id: str) -> None:
    field, request_id = ("request_id", own) if own else (REQUEST_ID_HEADER, header_id)
    violations.check_bytes(field, request_id, 0, MAX_REQUEST_ID_BYTES)


def _check_prompt(
    violations: Violations, request: inference_pb2.GenerateRequest, token_ids: list[int], model: ServedModel
) -> None:
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        violations.add("prompt", "is missing; one of text, token_ids and chat is required")
    elif prompt == "text" and model.tokenizer is None:
        violations.unsupported("text", f"model {model.name!r} has no tokenizer; send token_ids")
    elif prompt == "token_ids":
        violations.check_ids("token_ids.ids", token_ids, model.vocab_size)
    elif prompt == "chat":
        _check_chat(violations, request.chat, model)
    if prompt in ("token_ids", "chat"):
        for option in ("omit_special_tokens", "parse_special_tokens"):
            if getattr(request, option):
                violations.add(option, f"applies to text prompts only; leave it out with {prompt}")


def _check_chat(violations: Violations, chat: inference_pb2.Chat, model: ServedModel) -> None:
    if model.chat is None:
        violations.unsupported("chat", f"model {model.name!r} has no chat template; send text or token_ids")
    violations.check_count("chat.messages", len(chat.messages), MAX_CHAT_MESSAGES, least=1)
    for index, message in enumerate(chat.messages):
        if ROLE.fullmatch(message.role) is None:
            shown = message.role if len(message.role) <= 64 else message.role[:64] + "…"
            accepts = "such as system, user or assistant: 1 to 64 letters, digits, - and _"
            violations.add(f"chat.messages[{index}].role", f"{shown!r} is not accepted; accepted: {accepts}")


def _max_new_tokens(violations: Violations, given: inference_pb2.StoppingCriteria, model: ServedModel) -> int:
    if not given.HasField("max_new_tokens"):
        return model.default_max_new_tokens
    violations.check("stopping.max_new_tokens", given.max_new_tokens, Integer(0, model.max_new_tokens_limit))
    return given.max_new_tokens


def _check_stopping(
    violations: Violations, given: inference_pb2.StoppingCriteria, max_new_tokens: int, model: ServedModel
) -> None:
    if not given.min_new_tokens <= max_new_tokens:
        accepts = f"0 to max_new_tokens, which is {max_new_tokens}"
        violations.add("stopping.min_new_tokens", f"{given.min_new_tokens} is not accepted; accepted: {accepts}")
    violations.check_count("stopping.stop_strings", len(given.stop_strings), MAX_STOP_STRINGS)
    if given.stop_strings and model.tokenizer is None:
        violations.unsupported("stopping.stop_strings", f"model {model.name!r} has no tokenizer; use stop_token_ids")
    for index, stop in enumerate(given.stop_strings[:MAX_STOP_STRINGS]):
        violations.check_bytes(f"stopping.stop_strings[{index}]", stop, 1, MAX_STOP_STRING_BYTES)
    violations.check_count("stopping.stop_token_ids", len(given.stop_token_ids), MAX_STOP_TOKEN_IDS)
    violations.check_ids("stopping.stop_token_ids", given.stop_token_ids, model.vocab_size)


def _time_limit(violations: Violations, given: inference_pb2.StoppingCriteria) -> float | None:
    if not given.HasField("time_limit"):
        return None
    seconds = duration_seconds(given.time_limit)
    if seconds is None or not seconds > 0:
        shown = f"{given.time_limit.seconds} s {given.time_limit.nanos} ns"
        accepts = "more than 0 s and at most 315576000000 s"
        violations.add("stopping.time_limit", f"{shown} is not accepted; accepted: {accepts}")
    return seconds


def duration_seconds(duration: Duration) -> float | None:
    """None where the message is no valid google.protobuf.Duration."""
    sign_matches = duration.seconds == 0 or duration.nanos == 0 or (duration.seconds > 0) == (duration.nanos > 0)
    in_range = abs(duration.seconds) <= 315_576_000_000 and abs(duration.nanos) <= 999_999_999
    return duration.seconds + duration.nanos / 1e9 if sign_matches and in_range else None


def _delivery_rules(violations: Violations, given: inference_pb2.OutputOptions) -> DeliveryRules:
    if given.delivery_mode not in _DELIVERY_MODES:
        accepts = "DELIVERY_MODE_INCREMENTAL (1) or DELIVERY_MODE_FINAL (2)"
        violations.unsupported("output.delivery_mode", f"{given.delivery_mode} is not accepted; accepted: {accepts}")
    has_min_tokens = given.HasField("min_tokens_per_message")
    min_tokens = given.min_tokens_per_message if has_min_tokens else 1
    violations.check("output.min_tokens_per_message", min_tokens, MIN_TOKENS_PER_MESSAGE)
    return DeliveryRules(
        final_only=given.delivery_mode == inference_pb2.DELIVERY_MODE_FINAL,
        min_tokens=min_tokens,
        with_text=not given.omit_text,
        with_token_ids=not given.omit_token_ids,
        paced=not has_min_tokens,
    )


def _context(violations: Violations, policy: inference_pb2.ContextPolicy, model: ServedModel) -> ContextWish:
    """The policy, AUTO resolved, with its numbers within the context; `planning` fits them together."""
    given = int(policy.overflow)
    if given not in _OVERFLOWS:
        accepts = f"CONTEXT_OVERFLOW_AUTO ({inference_pb2.CONTEXT_OVERFLOW_AUTO}), _REJECT, _TRUNCATE, _ROLL, _REENCODE"
        violations.unsupported("context.overflow", f"{given} is not accepted; accepted: {accepts}")
    overflow = _OVERFLOWS.get(given) or model.overflow
    if overflow == "auto":
        overflow = "roll" if model.can_roll else "reencode"
    if overflow == "roll" and not model.can_roll:
        text = "ROLL needs rotary, ALiBi or no positions; this model's are absolute: use REENCODE, or AUTO"
        violations.add("context.overflow", text)
    wish = ContextWish(
        overflow,
        window=policy.window_tokens if policy.HasField("window_tokens") else None,
        sinks=policy.sink_tokens if policy.HasField("sink_tokens") else None,
        hop=policy.hop_tokens if policy.HasField("hop_tokens") else None,
    )
    _check_window(violations, wish, model.context_length)
    return wish


def _check_window(violations: Violations, wish: ContextWish, context_length: int) -> None:
    numbers = (
        ("window_tokens", wish.window, ("roll", "reencode"), Integer(1, context_length)),
        ("sink_tokens", wish.sinks, ("roll", "reencode"), Integer(0, context_length - 1)),
        ("hop_tokens", wish.hop, ("reencode",), Integer(1, context_length)),
    )
    for name, value, policies, accepted in numbers:
        if value is None:
            continue
        if wish.overflow in policies:
            violations.check(f"context.{name}", value, accepted)
        else:
            policy = wish.overflow.upper()
            violations.add(f"context.{name}", f"does not apply to the policy {policy}; leave it out")
