"""What a decoder looks like: one frozen record, validated once, stored as `config.json`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from pellucid_model.errors import ConfigError

Position = Literal["sinusoidal", "learned", "rotary", "alibi", "none"]
Norm = Literal["layernorm", "rmsnorm"]
NormPlacement = Literal["pre", "post"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"]

ARCHITECTURE = "pellucid.decoder"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of the configurable decoder. Sizes are in elements, lengths in tokens."""

    vocab_size: int
    context_length: int
    """Trained context N: positions are 0 … N - 1."""
    d_model: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of keys and values: `heads` for MHA, 1 for MQA, a divisor of `heads` for GQA."""
    head_dim: int
    """Independent of d_model / heads."""
    d_ff: int
    position: Position = "sinusoidal"
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0
    """Share of head_dim that is rotated; the rest carries no position."""
    rotary_interleaved: bool = False
    """Rotate pairs (0, 1), (2, 3), … instead of halves."""
    embedding_scale: float = 1.0
    """Factor on token embeddings; sqrt(d_model) in Vaswani et al. 2017."""
    norm: Norm = "layernorm"
    norm_placement: NormPlacement = "pre"
    """"pre": x + f(norm(x)) and a final norm. "post": norm(x + f(x))."""
    norm_eps: float = 1e-5
    activation: Activation = "relu"
    """swiglu, geglu and geglu_tanh gate with silu, gelu and tanh-approximated gelu."""
    attention_bias: bool = True
    attention_output_bias: bool | None = None
    """None: as attention_bias."""
    mlp_bias: bool = True
    head_bias: bool = False
    tied_head: bool = False
    """The output layer is the embedding matrix."""
    attention_softcap: float | None = None
    windows: tuple[int | None, ...] | None = None
    """Per layer: attend to this many tokens, oneself included; None: to all. None for the whole field: no windows."""
    dropout: float = 0.0
    """Training only."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "d_model", "layers", "heads", "kv_heads", "head_dim", "d_ff"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        _require(0.0 <= self.dropout < 1.0, "dropout", self.dropout, "in [0, 1)")
        _require(0.0 < self.norm_eps < 1.0, "norm_eps", self.norm_eps, "in (0, 1)")
        _require(_positive(self.embedding_scale), "embedding_scale", self.embedding_scale, "a finite number above 0")
        if self.position == "rotary":
            _require(_positive(self.rotary_base), "rotary_base", self.rotary_base, "a finite number above 0")
            _require(0.0 < self.rotary_fraction <= 1.0, "rotary_fraction", self.rotary_fraction, "in (0, 1]")
            _require(
                self.rotary_dim >= 2 and self.rotary_dim % 2 == 0,
                "rotary_fraction",
                self.rotary_fraction,
                f"such that an even number of a head's {self.head_dim} dimensions turns (not {self.rotary_dim})",
            )
        if self.position == "sinusoidal":
            _require(self.d_model % 2 == 0, "d_model", self.d_model, "even with sinusoidal positions")
        if self.attention_softcap is not None:
            _require(_positive(self.attention_softcap), "attention_softcap", self.attention_softcap, "above 0")
        if self.windows is not None:
            _require(len(self.windows) == self.layers, "windows", self.windows, f"one per layer ({self.layers})")
            for window in self.windows:
                _require(window is None or window >= 1, "windows", window, "null or at least 1")

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    def window(self, layer: int) -> int | None:
        return None if self.windows is None else self.windows[layer]

    def to_json(self) -> dict[str, Any]:
        """The content of config.json."""
        return {"architecture": ARCHITECTURE, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> DecoderConfig:
        """Strict reading of config.json: unknown, missing or mistyped keys raise ConfigError naming the key."""
        values = dict(values)
        architecture = values.pop("architecture", None)
        _require(architecture == ARCHITECTURE, "architecture", architecture, repr(ARCHITECTURE))
        hints = get_type_hints(DecoderConfig)
        for key in values:
            if key not in hints:
                raise ConfigError(f"config {key} = {values[key]!r}: the decoder's configuration has no such key")
        for field in dataclasses.fields(DecoderConfig):
            if field.default is dataclasses.MISSING and field.name not in values:
                raise ConfigError(f"config {field.name} is missing")
        if isinstance(values.get("windows"), list):
            values["windows"] = tuple(values["windows"])
        for key, value in values.items():
            values[key] = _typed(key, value, hints[key])
        return DecoderConfig(**values)


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _require(ok: bool, key: str, value: object, accepted: str) -> None:
    if not ok:
        raise ConfigError(f"config {key} = {value!r}: must be {accepted}")


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value as the field's type, or ConfigError. An integer is a fine float; a bool is not a number."""
    choices = get_args(hint) or (hint,)
    if value is None and type(None) in choices:
        return None
    if key == "windows":
        ok = isinstance(value, tuple) and all(w is None or type(w) is int for w in value)
        _require(ok, key, value, "a list of integers and nulls")
        return value
    if all(isinstance(choice, str) for choice in choices):
        _require(value in choices, key, value, "one of " + ", ".join(repr(choice) for choice in choices))
        return value
    if float in choices and type(value) in (int, float):
        return float(value)
    names = ", ".join(choice.__name__ for choice in choices if choice is not type(None))
    _require(type(value) in choices, key, value, f"of type {names}")
    return value
