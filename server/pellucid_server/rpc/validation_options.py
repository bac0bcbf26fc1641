"""What a request asks of the engine beside sampling and lengths: log-probabilities, constraint, cache, priority."""

from __future__ import annotations

from collections.abc import Callable

from pellucid.v1 import inference_pb2
from pellucid_server.engine.messages import Constraint, LogprobWish
from pellucid_server.live_request import EngineOptions
from pellucid_server.options import Integer
from pellucid_server.rpc.violations import Violations
from pellucid_server.served import ServedModel

MAX_LOGPROB_TOKEN_IDS = 64
MAX_CONSTRAINT_BYTES = 65536
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 4096
MAX_SALT_BYTES = 256
PRIORITY = Integer(-100, 100)


def validated_options(
    violations: Violations, request: inference_pb2.GenerateRequest, model: ServedModel
) -> EngineOptions:
    violations.check("priority", request.priority, PRIORITY)
    violations.check_bytes("cache.salt", request.cache.salt, 0, MAX_SALT_BYTES)
    return EngineOptions(
        priority=request.priority,
        output_logprobs=_logprobs(violations, request.output, "output_logprobs", model),
        prompt_logprobs=_logprobs(violations, request.output, "prompt_logprobs", model),
        constraint=_constraint(violations, request, model),
        cache_read=not request.cache.bypass_read,
        cache_write=not request.cache.bypass_write,
        cache_salt=request.cache.salt,
    )


def _logprobs(
    violations: Violations, output: inference_pb2.OutputOptions, name: str, model: ServedModel
) -> LogprobWish | None:
    if not output.HasField(name):
        return None
    field, given = f"output.{name}", getattr(output, name)
    violations.check(f"{field}.top_count", given.top_count, Integer(0, model.max_logprobs))
    violations.check_count(f"{field}.token_ids", len(given.token_ids), MAX_LOGPROB_TOKEN_IDS)
    violations.check_ids(f"{field}.token_ids", given.token_ids, model.vocab_size)
    if name == "output_logprobs" and given.start_position != 0:
        violations.add(f"{field}.start_position", "applies to prompt_logprobs only; leave it out")
    return LogprobWish(given.top_count, tuple(dict.fromkeys(given.token_ids)), given.start_position)


def _constraint(
    violations: Violations, request: inference_pb2.GenerateRequest, model: ServedModel
) -> Constraint | None:
    """Sizes only; whether its text makes sense is found out where there is time for it."""
    if not request.HasField("constraint"):
        return None
    kind = request.constraint.WhichOneof("constraint")
    if model.tokenizer is None:
        violations.unsupported("constraint", f"model {model.name!r} has no tokenizer")
    if kind is None:
        names = ", ".join(field.name for field in request.constraint.DESCRIPTOR.fields)
        violations.add("constraint", f"is empty; one of {names} is required")
        return None
    return _KINDS[kind](violations, request.constraint)


def _text(field: str, kind: str) -> Callable[[Violations, inference_pb2.DecodingConstraint], Constraint]:
    def read(violations: Violations, given: inference_pb2.DecodingConstraint) -> Constraint:
        text: str = getattr(given, field)
        violations.check_bytes(f"constraint.{field}", text, 1, MAX_CONSTRAINT_BYTES)
        return Constraint(kind, text)  # type: ignore[arg-type]

    return read


def _choices(violations: Violations, given: inference_pb2.DecodingConstraint) -> Constraint:
    field, values = "constraint.choices.values", given.choices.values
    violations.check_count(field, len(values), MAX_CHOICES, least=1)
    for index, value in enumerate(values[:MAX_CHOICES]):
        violations.check_bytes(f"{field}[{index}]", value, 1, MAX_CHOICE_BYTES)
    return Constraint("choices", choices=tuple(dict.fromkeys(values)))


_KINDS: dict[str, Callable[[Violations, inference_pb2.DecodingConstraint], Constraint]] = {
    "json_schema": _text("json_schema", "json_schema"),
    "json_object": lambda violations, given: Constraint("json_object"),
    "regex": _text("regex", "regex"),
    "ebnf_grammar": _text("ebnf_grammar", "ebnf"),
    "choices": _choices,
}
CONSTRAINT_FIELDS = {
    "json_schema": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "ebnf": "ebnf_grammar",
    "choices": "choices",
}
"""Fields of DecodingConstraint by the engine's names for them."""
