"""How configs speak of rotary embeddings, in their old and new keys, read as ours.

Old: `rope_theta`, `partial_rotary_factor`, and `rope_scaling` with `type` or `rope_type`. New: `rope_parameters`, with
all of it inside. Every scaling is worked out here, so that the model only sees frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pellucid_model.contract import Rotary
from pellucid_model.errors import ConfigError
from pellucid_model.families.reader import ConfigReader
from pellucid_model.positions import llama3_frequencies, yarn_attention_factor, yarn_frequencies


def read_rotary(config: ConfigReader, head_dim: int, context_length: int) -> dict[str, Any]:
    """DecoderConfig's keys for rotary positions, context_length among them."""
    base = config.number("rope_theta", 10000.0)
    fraction = config.number("partial_rotary_factor", 1.0)
    key, values = _scaling(config)
    kind = _kind(key, values)
    inner = config.of(key, values)
    base = inner.number("rope_theta", base)
    if base <= 1:
        inner.refuse("rope_theta", base, "above 1")
    fraction = inner.number("partial_rotary_factor", fraction)
    if fraction > 1:
        inner.refuse("partial_rotary_factor", fraction, "at most 1")
    dim = int(head_dim * fraction)
    plain = _Plain(Rotary.from_base(dim, base).inv_freq, base, context_length)
    scaled = _KINDS[kind](config, inner, plain)
    inner.done()
    return {
        "position": "rotary",
        "rotary_base": base,
        "rotary_fraction": dim / head_dim,
        "context_length": context_length,
        **scaled,
    }


def split_by_layer_type(config: ConfigReader) -> float | None:
    """`rope_parameters` by kind of layer: leaves full attention's to read_rotary -> the base of sliding layers."""
    given = config.take("rope_parameters", {})
    if not isinstance(given, dict) or not given.keys() & {"sliding_attention", "full_attention"}:
        config.default(rope_parameters=given)
        return None
    by_type = config.of("rope_parameters", given)
    sliding = by_type.inner("sliding_attention")
    sliding.expect("rope_type", "default")
    base = sliding.optional_number("rope_theta")
    sliding.done()
    config.default(rope_parameters=by_type.take("full_attention", {}))
    by_type.done()
    return base


def _scaling(config: ConfigReader) -> tuple[str, dict[str, Any]]:
    """The dictionary that describes the scaling, and the key that it was under."""
    old, new = config.take("rope_scaling", {}), config.take("rope_parameters", {})
    for key, given in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(given, dict):
            config.refuse(key, given, "an object")
    if not old:
        return "rope_parameters", dict(new)
    if new.get("rope_type", "default") == "default":  # says at most the base
        return "rope_scaling", {**{name: value for name, value in new.items() if name != "rope_type"}, **old}
    if old != new:
        raise ConfigError(f"config rope_scaling = {old!r} contradicts rope_parameters = {new!r}")
    return "rope_scaling", dict(old)


def _kind(key: str, values: dict[str, Any]) -> str:
    """The kind of scaling, taken out of `values`."""
    old, new = values.pop("type", None), values.pop("rope_type", None)
    if old and new and old != new and {str(old), str(new)} != {"longrope", "su"}:
        raise ConfigError(f"config {key}: type = {old!r} and rope_type = {new!r} contradict each other")
    kind = new or old or "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"config {key}: rope_type = {kind!r} is not supported: must be one of {', '.join(_KINDS)}")
    return kind


@dataclass(frozen=True, eq=False)
class _Plain:
    """What a scaling begins with."""

    frequencies: Tensor
    """[dim / 2] float64."""
    base: float
    context: int


# Each scaling takes the config, a reader of its own object and the plain rotary, and gives DecoderConfig's keys.


def _default(config: ConfigReader, inner: ConfigReader, plain: _Plain) -> dict[str, Any]:
    return {}


def _linear(config: ConfigReader, inner: ConfigReader, plain: _Plain) -> dict[str, Any]:
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""
    return {"rotary_frequencies": tuple((plain.frequencies / inner.number("factor")).tolist())}


def _dynamic(config: ConfigReader, inner: ConfigReader, plain: _Plain) -> dict[str, Any]:
    """Plain up to the trained context; beyond, the frequencies would change with the length, and with them all keys."""
    inner.number("factor")
    config.notice(
        f"dynamic rotary scaling is served up to the trained context, {plain.context} tokens, where it does nothing"
    )
    return {}


def _llama3(config: ConfigReader, inner: ConfigReader, plain: _Plain) -> dict[str, Any]:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        inner.refuse("low_freq_factor", low, f"below high_freq_factor = {high!r}")
    factor, original = inner.number("factor"), inner.count("original_max_position_embeddings", plain.context)
    scaled = llama3_frequencies(plain.frequencies, factor=factor, low=low, high=high, original=original)
    return {"rotary_frequencies": tuple(scaled.tolist())}


def _yarn(config: ConfigReader, inner: ConfigReader, plain: _Plain) -> dict[str, Any]:
    """The context is the original one times the factor, where max_position_embeddings still is the original one."""
    original = inner.count("original_max_position_embeddings", plain.context)
    factor = inner.number("factor", plain.context / original)
    scaled = yarn_frequencies(
        plain.frequencies,
        plain.base,
        factor=factor,
        original=original,
        fast=inner.number("beta_fast", 32.0),
        slow=inner.number("beta_slow", 1.0),
        whole=inner.flag("truncate", True),
    )
    mscale, mscale_all = inner.optional_number("mscale"), inner.optional_number("mscale_all_dim")
    scale = yarn_attention_factor(factor)
    if mscale and mscale_all:
        scale = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all)
    return {
        "rotary_frequencies": tuple(scaled.tolist()),
        "rotary_scale": inner.number("attention_factor", scale),
        "context_length": max(plain.context, int(original * factor)),
    }


def _longrope(config: ConfigReader, inner: ConfigReader, plain: _Plain) -> dict[str, Any]:
    """Short factors up to the original context (Ding et al. 2024, arXiv:2402.13753).

    A longer sequence would take other factors for all its keys, those in the cache included, so it is not served.
    """
    original = inner.count("original_max_position_embeddings", plain.context)
    original = config.count("original_max_position_embeddings", original)
    factor = inner.number("factor", plain.context / original)
    short, _ = (_factors(inner, name, len(plain.frequencies)) for name in ("short_factor", "long_factor"))
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    if original < plain.context:
        config.notice(
            f"long-context rotary scaling is served up to the original context, {original} of {plain.context} tokens, "
            "since a longer sequence needs other keys from its first token on"
        )
    return {
        "rotary_frequencies": tuple((plain.frequencies / plain.frequencies.new_tensor(short)).tolist()),
        "rotary_scale": inner.number("attention_factor", scale),
        "context_length": min(original, plain.context),
    }


def _factors(inner: ConfigReader, name: str, count: int) -> list[float]:
    value = inner.take(name)
    if not isinstance(value, list) or len(value) != count or not all(type(f) in (int, float) and f > 0 for f in value):
        inner.refuse(name, value, f"{count} numbers above 0")
    factors: list[float] = value
    return factors


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
"""By `rope_type`; su is longrope's first name."""
