"""What a decoder looks like: one frozen record, validated once, stored as `config.json`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pellucid_model.errors import ConfigError

Position = Literal["sinusoidal", "learned", "rotary", "alibi", "none"]
Norm = Literal["layernorm", "rmsnorm"]
NormPlacement = Literal["pre", "post", "output", "sandwich"]
Residual = Literal["sequential", "parallel", "parallel_shared"]
QueryKeyNorm = Literal["head", "per_head", "all_heads"]
Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu", "reglu", "swiglu", "geglu", "geglu_tanh"]

ARCHITECTURE = "pellucid.decoder"
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM = 10_000, 1 << 16, 1 << 16
_LARGEST = {
    **dict.fromkeys(("vocab_size", "context_length", "d_ff"), (1 << 31) - 1),
    "d_model": 1 << 24,
    "layers": MAX_LAYERS,
    **dict.fromkeys(("heads", "kv_heads"), MAX_HEADS),
    "head_dim": MAX_HEAD_DIM,
}
"""So that a damaged config.json is refused before anything of its size is made."""
_POSITIVE = (
    *("embedding_dim", "embedding_scale", "residual_scale"),
    *("attention_scale", "attention_softcap", "logit_scale", "logit_softcap"),
)
_POSITIVE_IF_ROTARY = ("rotary_base", "rotary_window_base", "rotary_scale")


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
    rotary_frequencies: tuple[float, ...] | None = None
    """Angle per position of each rotated pair, for scaled rotary embeddings; None: rotary_base^(-2i/dim)."""
    rotary_scale: float = 1.0
    """Factor on cos and sin: YaRN's attention factor."""
    rotary_window_base: float | None = None
    """Base in layers that have a window, whose frequencies are then not scaled; None: as everywhere."""
    rotary_layers: tuple[bool, ...] | None = None
    """Per layer: whether it rotates; one that does not has no position. None: all do."""
    embedding_dim: int | None = None
    """Width of the token embeddings and of the head, projected to and from d_model; None: d_model."""
    embedding_scale: float = 1.0
    """Factor on token embeddings; sqrt(d_model) in Vaswani et al. 2017."""
    embedding_norm: bool = False
    """Normalise token embeddings, before positions are added."""
    norm: Norm = "layernorm"
    norm_placement: NormPlacement = "pre"
    """"pre": x + f(norm(x)). "post": norm(x + f(x)). "output": x + norm(f(x)). "sandwich": x + norm(f(norm(x)))."""
    norm_eps: float = 1e-5
    norm_weight: bool = True
    """Whether norms have weights and, with layernorm, biases."""
    norm_bias: bool = True
    """Whether layernorm has a bias."""
    final_norm: bool | None = None
    """A norm after the last block; None: unless norm_placement is "post"."""
    residual: Residual = "sequential"
    """"parallel": x + attention(norm1(x)) + feed_forward(norm2(x)); "parallel_shared": norm1 for both."""
    residual_scale: float = 1.0
    """Factor on what attention and feed-forward add to x."""
    activation: Activation = "relu"
    """relu2 is relu squared; reglu, swiglu, geglu, geglu_tanh gate with relu, silu, gelu and tanh-approximated gelu."""
    attention_bias: bool = True
    attention_output_bias: bool | None = None
    """None: as attention_bias."""
    mlp_bias: bool = True
    head_bias: bool = False
    tied_head: bool = False
    """The output layer is the embedding matrix."""
    query_key_norm: QueryKeyNorm | None = None
    """Normalise queries and keys, over each head ("head": the same weights for all; "per_head": weights of its own,
    no bias) or over all heads together ("all_heads")."""
    attention_scale: float | None = None
    """Factor on q·k; None: 1/sqrt(head_dim)."""
    attention_softcap: float | None = None
    logit_scale: float = 1.0
    """Factor on logits."""
    logit_softcap: float | None = None
    """logit = softcap * tanh(logit / softcap), after the factor."""
    windows: tuple[int | None, ...] | None = None
    """Per layer: attend to this many tokens, oneself included; None: to all. None for the whole field: no windows."""
    dropout: float = 0.0
    """Training only."""

    def __post_init__(self) -> None:
        for name, most in _LARGEST.items():
            _require(1 <= getattr(self, name) <= most, name, getattr(self, name), f"from 1 to {most}")
        _require(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        _require(0.0 <= self.dropout < 1.0, "dropout", self.dropout, "in [0, 1)")
        _require(0.0 < self.norm_eps < 1.0, "norm_eps", self.norm_eps, "in (0, 1)")
        for name in _POSITIVE:
            self._require_positive(name)
        if self.position == "rotary":
            self._check_rotary()
        if self.position == "sinusoidal":
            _require(self.d_model % 2 == 0, "d_model", self.d_model, "even with sinusoidal positions")
        parallel = self.residual != "sequential"
        _require(
            not parallel or self.norm_placement == "pre", "residual", self.residual, "sequential unless norms are pre"
        )
        for name in ("windows", "rotary_layers"):
            value = getattr(self, name)
            _require(value is None or len(value) == self.layers, name, value, f"one per layer ({self.layers})")
        for window in self.windows or ():
            _require(window is None or window >= 1, "windows", window, "null or at least 1")

    def _check_rotary(self) -> None:
        for name in _POSITIVE_IF_ROTARY:
            self._require_positive(name)
        _require(0.0 < self.rotary_fraction <= 1.0, "rotary_fraction", self.rotary_fraction, "in (0, 1]")
        _require(
            self.rotary_dim >= 2 and self.rotary_dim % 2 == 0,
            "rotary_fraction",
            self.rotary_fraction,
            f"such that an even number of a head's {self.head_dim} dimensions turns (not {self.rotary_dim})",
        )
        frequencies = self.rotary_frequencies
        _require(
            frequencies is None
            or (len(frequencies) == self.rotary_dim // 2 and all(math.isfinite(f) and f >= 0 for f in frequencies)),
            "rotary_frequencies",
            frequencies,
            f"one number, 0 or more, for each of {self.rotary_dim // 2} pairs",
        )

    def _require_positive(self, name: str) -> None:
        """Unset, or a finite number above 0."""
        value = getattr(self, name)
        _require(value is None or (math.isfinite(value) and value > 0), name, value, "a finite number above 0")

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(round(self.head_dim * self.rotary_fraction, 6))

    def window(self, layer: int) -> int | None:
        return None if self.windows is None else self.windows[layer]

    def rotates(self, layer: int) -> bool:
        return self.position == "rotary" and (self.rotary_layers is None or self.rotary_layers[layer])

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
        for key, value in values.items():
            values[key] = _typed(key, tuple(value) if isinstance(value, list) else value, hints[key])
        return DecoderConfig(**values)


def _require(ok: bool, key: str, value: object, accepted: str) -> None:
    if not ok:
        raise ConfigError(f"config {key} = {value!r}: must be {accepted}")


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value as the field's type, or ConfigError. An integer is a fine float; a bool is not a number."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in choices:
        return None
    wanted = next(choice for choice in choices if choice is not type(None))
    if get_origin(wanted) is tuple:
        _require(isinstance(value, tuple), key, value, "a list")
        return tuple(_typed(key, one, get_args(wanted)[0]) for one in value)
    if get_origin(wanted) is Literal:
        names = get_args(wanted)
        _require(value in names, key, value, "one of " + ", ".join(repr(name) for name in names))
        return value
    if wanted is float and type(value) is int:
        return float(value)
    _require(type(value) is wanted, key, value, f"of type {wanted.__name__}")
    return value
