"""A GenerateRequest's values against what is accepted, all violations in one answer, and the defaults filled in.

Ranges are stated as what is accepted, so that NaN is refused; presence is asked for, never truth, so that 0 is a value.
Everything that needs no tokens is checked here; `planning` checks the prompt's length once it is tokenized.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import pack, unpack

from google.protobuf.duration_pb2 import Duration

from pellucid.v1 import inference_pb2, types_pb2
from pellucid_server.delivery import DeliveryRules
from pellucid_server.engine.messages import Sampling
from pellucid_server.errors import InvalidRequest, ModelNotFound, UnsupportedField, Violation
from pellucid_server.options import Integer, Number
from pellucid_server.planning import ContextWish, Wishes, check_room
from pellucid_server.rpc.wire import MAX_LISTED
from pellucid_server.served import ServedModel
from pellucid_server.settings import MIN_P, TEMPERATURE, TOP_K, TOP_P

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_BYTES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 256
MIN_TOKENS_PER_MESSAGE = Integer(1, 256)

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
    """A valid request with every default filled in. Exactly one of `text` and `token_ids` is set."""

    text: str | None
    token_ids: list[int] | None
    add_special_tokens: bool
    parse_special_tokens: bool
    wishes: Wishes
    stop_strings: tuple[str, ...]
    include_stop_in_text: bool
    time_limit: float | None
    rules: DeliveryRules
    keep_special_tokens: bool
    return_prompt_token_ids: bool


class Violations:
    """Gathers what is wrong; `raise_any` speaks."""

    def __init__(self) -> None:
        self._found: list[Violation] = []
        self._unsupported = False

    def add(self, field: str, description: str) -> None:
        self._found.append(Violation(field, description))

    def unsupported(self, field: str, description: str) -> None:
        self._unsupported = True
        self.add(field, description)

    def check(self, field: str, value: float, option: Integer | Number) -> None:
        try:
            option.parse(value)
        except ValueError:
            shown = _float32_text(value) if isinstance(value, float) else str(value)
            self.add(field, f"{shown} is not accepted; accepted: {option.accepts}")

    def check_count(self, field: str, count: int, limit: int) -> None:
        if not count <= limit:
            self.add(field, f"has {count} entries; accepted: at most {limit}")

    def check_ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        if ids and not max(ids) < vocab_size:
            index, token_id = next((i, t) for i, t in enumerate(ids) if not t < vocab_size)
            self.add(f"{field}[{index}]", f"{token_id} is not accepted; accepted: token ids from 0 to {vocab_size - 1}")

    def raise_any(self) -> None:
        """Raises UnsupportedField if a field cannot be served at all, else InvalidRequest, else nothing."""
        if self._found:
            kind = UnsupportedField if self._unsupported else InvalidRequest
            raise kind(self._found[:MAX_LISTED])


def _float32_text(value: float) -> str:
    """The fewest digits, from 6 on, that tell a float32 apart from all others: 1.0000001 is not 1."""
    texts = [f"{value:.{digits}g}" for digits in (6, 7, 8, 9)]
    return next((text for text in texts if unpack("f", pack("f", float(text)))[0] == value), texts[-1])


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
    _check_prompt(violations, request, model)
    sampling = _sampling(violations, request.sampling, model)
    wishes = Wishes(
        prompt_field="text" if request.WhichOneof("prompt") == "text" else "token_ids.ids",
        sampling=sampling,
        max_new_tokens=_max_new_tokens(violations, request.stopping, model),
        min_new_tokens=request.stopping.min_new_tokens,
        stop_ids=tuple(request.stopping.stop_token_ids),
        ignore_eos=request.stopping.ignore_eos,
        context=_context(violations, request.context, model),
    )
    _check_stopping(violations, request.stopping, wishes.max_new_tokens, model)
    time_limit = _time_limit(violations, request.stopping)
    rules = _delivery_rules(violations, request.output)
    violations.raise_any()
    is_text = request.WhichOneof("prompt") == "text"
    if not is_text and wishes.context.overflow == "reject":
        check_room(model, wishes, len(request.token_ids.ids))
    return GenerateSpec(
        text=request.text if is_text else None,
        token_ids=None if is_text else list(request.token_ids.ids),
        add_special_tokens=not request.omit_special_tokens,
        parse_special_tokens=request.parse_special_tokens,
        wishes=replace(wishes, sampling=_with_seed(sampling, request.sampling)),
        stop_strings=tuple(request.stopping.stop_strings),
        include_stop_in_text=request.stopping.include_stop_in_text,
        time_limit=time_limit,
        rules=rules,
        keep_special_tokens=request.output.keep_special_tokens,
        return_prompt_token_ids=request.output.return_prompt_token_ids,
    )


def _check_request_id(violations: Violations, own: str, header_id: str) -> None:
    field, request_id = ("request_id", own) if own else (REQUEST_ID_HEADER, header_id)
    size = len(request_id.encode())
    if not size <= MAX_REQUEST_ID_BYTES:
        violations.add(field, f"is {size} bytes long; accepted: at most {MAX_REQUEST_ID_BYTES} bytes")


def _check_prompt(violations: Violations, request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        violations.add("prompt", "is missing; one of text and token_ids is required")
    elif prompt == "text" and model.tokenizer is None:
        violations.unsupported("text", f"model {model.name!r} has no tokenizer; send token_ids")
    elif prompt == "token_ids":
        if request.omit_special_tokens:
            violations.add("omit_special_tokens", "applies to text prompts only; leave it out with token_ids")
        if request.parse_special_tokens:
            violations.add("parse_special_tokens", "applies to text prompts only; leave it out with token_ids")
        violations.check_ids("token_ids.ids", request.token_ids.ids, model.vocab_size)


def _sampling(violations: Violations, given: types_pb2.SamplingParams, model: ServedModel) -> Sampling:
    defaults = model.sampling
    temperature = given.temperature if given.HasField("temperature") else defaults.temperature
    top_k = given.top_k if given.HasField("top_k") else defaults.top_k
    top_p = given.top_p if given.HasField("top_p") else defaults.top_p
    min_p = given.min_p if given.HasField("min_p") else defaults.min_p
    violations.check("sampling.temperature", temperature, TEMPERATURE)
    violations.check("sampling.top_k", top_k, TOP_K)
    violations.check("sampling.top_p", top_p, TOP_P)
    violations.check("sampling.min_p", min_p, MIN_P)
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=given.seed)


def _with_seed(sampling: Sampling, given: types_pb2.SamplingParams) -> Sampling:
    """The caller's seed, 0 included, or one drawn here."""
    seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed)


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
        size = len(stop.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            accepts = f"1 to {MAX_STOP_STRING_BYTES} bytes"
            violations.add(f"stopping.stop_strings[{index}]", f"is {size} bytes long; accepted: {accepts}")
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
    min_tokens = given.min_tokens_per_message if given.HasField("min_tokens_per_message") else 1
    violations.check("output.min_tokens_per_message", min_tokens, MIN_TOKENS_PER_MESSAGE)
    return DeliveryRules(
        final_only=given.delivery_mode == inference_pb2.DELIVERY_MODE_FINAL,
        min_tokens=min_tokens,
        with_text=not given.omit_text,
        with_token_ids=not given.omit_token_ids,
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
