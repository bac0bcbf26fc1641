"""The strict reading of somebody else's config.json: every key is asked for, and what is left over is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pellucid_model.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS
from pellucid_model.errors import ConfigError

T = TypeVar("T")

# Keys that say nothing about what the model computes. So do those of one fine-tuning tool, and whatever has "drop" in
# its name concerns training alone.
_NEUTRAL = frozenset(
    {
        *("_name_or_path", "_from_model_config", "architectures", "auto_map", "model_type", "transformers_version"),
        *("torch_dtype", "initializer_range", "init_std", "pretraining_tp", "use_cache", "gradient_checkpointing"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("tokenizer_class", "prefix", "task_specific_params", "id2label", "label2id", "problem_type", "torchscript"),
        *("is_decoder", "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict"),
        *(
            "_attn_implementation",
            "_attn_implementation_autoset",
            "_flash_attn_2_enabled",
            "_commit_hash",
            "_num_labels",
        ),
        *("output_past", "n_special", "predict_special_tokens", "custom_pipelines", "transformers.js_config"),
        *("chunk_size_feed_forward", "attention_softmax_in_fp32", "reorder_and_upcast_attn", "cache_implementation"),
    }
)


def _is_neutral(key: str) -> bool:
    return key in _NEUTRAL or key.startswith("unsloth_") or "drop" in key


ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
}
"""Their names of activations and ours; they have five of gelu's tanh approximation."""
GATED = {"relu": "reglu", "silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
"""The gated feed-forward of an activation."""


class ConfigReader:
    """Every `take…` removes its key. A null is as good as an absent key."""

    def __init__(self, values: Mapping[str, Any], notices: list[str], prefix: str = "config ") -> None:
        """prefix: what stands before a key in messages."""
        self._prefix = prefix
        self._values = {key: value for key, value in values.items() if not _is_neutral(key)}
        self._notices = notices
        self.dtype = self._values.pop("dtype", None) or values.get("torch_dtype")
        """The type that the weights were saved in, as torch calls it; None where the config does not say."""

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._values

    def notice(self, text: str) -> None:
        """Something that the operator should know although the checkpoint loads."""
        self._notices.append(text)

    def alias(self, **canonical: str) -> None:
        """Read other names of keys, other="canonical"; both with different values are refused."""
        for other, key in canonical.items():
            value = self.take(other, None)
            if value is not None and self._values.setdefault(key, value) != value:
                raise ConfigError(f"{self._prefix}{other} = {value!r} contradicts {key} = {self._values[key]!r}")

    def default(self, **values: Any) -> None:
        """Values of keys that are absent or null."""
        for key, value in values.items():
            if self._values.get(key) is None:
                self._values[key] = value

    def take(self, key: str, *default: Any) -> Any:
        """The value as it is; the default where there is none; ConfigError where there is no default either."""
        value = self._values.pop(key, None)
        if value is None and not default:
            raise ConfigError(f"{self._prefix}{key} is missing")
        return default[0] if value is None else value

    def count(self, key: str, *default: int, least: int = 1, most: int = 2**31 - 1) -> int:
        """A whole number."""
        value: int = self.take(key, *default)
        ok = type(value) is int and least <= value <= most
        return self._typed(key, value, ok, f"a whole number from {least} to {most}")

    def layers(self, key: str) -> int:
        """A number of layers."""
        return self.count(key, most=MAX_LAYERS)

    def number(self, key: str, *default: float) -> float:
        """A finite number above 0."""
        value = self.take(key, *default)
        ok = type(value) in (int, float) and math.isfinite(value) and value > 0
        return float(self._typed(key, value, ok, "a finite number above 0"))

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None where there is none."""
        return self.number(key) if self._values.get(key) is not None else self.take(key, None)

    def optional_count(self, key: str) -> int | None:
        """A whole number, 1 or more, or None where there is none."""
        return self.count(key) if self._values.get(key) is not None else self.take(key, None)

    def flag(self, key: str, *default: bool) -> bool:
        value: bool = self.take(key, *default)
        return self._typed(key, value, type(value) is bool, "true or false")

    def activation(self, key: str, *default: str, gated: bool = False) -> Any:
        """An activation's name, as ours."""
        accepted = {theirs: ours for theirs, ours in ACTIVATIONS.items() if not gated or ours in GATED}
        value = self.take(key, *default)
        ok = isinstance(value, str) and value in accepted
        ours = accepted[self._typed(key, value, ok, "one of " + ", ".join(accepted))]
        return GATED[ours] if gated else ours

    def heads(self, heads: str, kv_heads: str | None, head_dim: str | None, d_model: int) -> dict[str, Any]:
        """Head counts and size under these keys; a key of None, or without a value, is what it usually is."""
        count = self.count(heads, most=MAX_HEADS)
        kv_count = self.count(kv_heads, count, most=MAX_HEADS) if kv_heads else count
        if count % kv_count:
            raise ConfigError(f"{self._prefix}{kv_heads} = {kv_count}: must be a divisor of {heads} = {count}")
        dim = self.optional_count(head_dim) if head_dim else None
        if head_dim and dim and dim > MAX_HEAD_DIM:
            self.refuse(head_dim, dim, f"at most {MAX_HEAD_DIM}")
        if dim is None and d_model % count:
            raise ConfigError(f"{self._prefix}{heads} = {count}: must be a divisor of the model's width {d_model}")
        return {"heads": count, "kv_heads": kv_count, "head_dim": dim or d_model // count}

    def inner(self, key: str) -> ConfigReader:
        """An object inside the config, to be read as strictly; empty where there is none."""
        value = self.take(key, {})
        return self.of(key, self._typed(key, value, isinstance(value, dict), "an object"))

    def of(self, key: str, values: Mapping[str, Any]) -> ConfigReader:
        """A reader of what was found under a key."""
        return ConfigReader(values, self._notices, f"{self._prefix}{key}.")

    def expect(self, key: str, *accepted: Any) -> None:
        """The key is absent, null, or has one of the accepted values."""
        value = self.take(key, None)
        if value is not None and value not in accepted:
            names = " or ".join(repr(one) for one in accepted)
            raise ConfigError(f"{self._prefix}{key} = {value!r} is not supported for this family: must be {names}")

    def ignore(self, *keys: str) -> None:
        """Keys that say nothing in this family."""
        for key in keys:
            self._values.pop(key, None)

    def done(self) -> None:
        """Refuse what nobody asked for."""
        if self._values:
            listed = ", ".join(f"{key} = {value!r}" for key, value in sorted(self._values.items()))
            raise ConfigError(f"{self._prefix.replace('.', ' ')}keys that are not understood: {listed}")

    def refuse(self, key: str, value: object, accepted: str) -> NoReturn:
        raise ConfigError(f"{self._prefix}{key} = {value!r}: must be {accepted}")

    def _typed(self, key: str, value: T, ok: bool, accepted: str) -> T:
        if not ok:
            self.refuse(key, value, accepted)
        return value
