"""SamplingParams: ranges, and the defaults filled in."""

from __future__ import annotations

import secrets
from typing import Any

from pellucid.v1 import types_pb2
from pellucid_server.engine.messages import Sampling
from pellucid_server.options import Integer, Number
from pellucid_server.ranges import SAMPLING
from pellucid_server.rpc.violations import Violations
from pellucid_server.served import ServedModel

MAX_LOGIT_BIASES = 1024
LOGIT_BIAS = Number(-100, 100)
MAX_ALLOWED_TOKEN_IDS = 4096


def validated_sampling(violations: Violations, given: types_pb2.SamplingParams, model: ServedModel) -> Sampling:
    """Every value resolved; a seed that is unset is drawn here."""
    values: dict[str, Any] = {}
    for name, option in SAMPLING.items():
        values[name] = getattr(given, name) if given.HasField(name) else getattr(model.sampling, name)
        violations.check(f"sampling.{name}", values[name], option)  # a default may have become 0 as it was rounded
    return Sampling(
        seed=given.seed if given.HasField("seed") else secrets.randbits(64),
        logit_bias=_logit_bias(violations, given, model),
        allowed_ids=_allowed_ids(violations, given, model),
        **values,
    )


def validated_sequence_count(violations: Violations, given: types_pb2.SamplingParams, model: ServedModel) -> int:
    count = given.sequence_count if given.HasField("sequence_count") else 1
    violations.check("sampling.sequence_count", count, Integer(1, model.max_sequences))
    return count


def _logit_bias(
    violations: Violations, given: types_pb2.SamplingParams, model: ServedModel
) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    if len(given.logit_bias) > MAX_LOGIT_BIASES:
        violations.check_count(field, len(given.logit_bias), MAX_LOGIT_BIASES)
        return ()
    biases = tuple(sorted(given.logit_bias.items()))
    if biases and not biases[-1][0] < model.vocab_size:
        accepts = f"token ids from 0 to {model.vocab_size - 1}"
        violations.add(f"{field}[{biases[-1][0]}]", f"is for no token; accepted: {accepts}")
    for token_id, bias in biases:
        violations.check(f"{field}[{token_id}]", bias, LOGIT_BIAS)
    return biases


def _allowed_ids(violations: Violations, given: types_pb2.SamplingParams, model: ServedModel) -> tuple[int, ...]:
    field = "sampling.allowed_token_ids"
    if len(given.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
        violations.check_count(field, len(given.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
        return ()
    violations.check_ids(field, given.allowed_token_ids, model.vocab_size)
    return tuple(sorted(set(given.allowed_token_ids)))
