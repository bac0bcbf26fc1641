"""How a family of checkpoints is declared, and the strict reading of its config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pellucid_model.config import DecoderConfig
from pellucid_model.errors import ConfigError

# Keys of a Hugging Face config.json that say nothing about the shape of the model.
_NEUTRAL = frozenset(
    {
        *("_name_or_path", "_from_model_config", "architectures", "model_type", "transformers_version"),
        *("dtype", "torch_dtype", "initializer_range", "attention_dropout", "pretraining_tp", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "id2label", "label2id"),
        *("is_decoder", "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict"),
        *("chunk_size_feed_forward", "problem_type"),
    }
)


class ConfigReader:
    """A config.json whose every key must be asked for: what is left over is refused by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {key: value for key, value in values.items() if key not in _NEUTRAL}

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._values

    def take(self, key: str, *default: Any) -> Any:
        """The value, removed; the default where the key is absent or null; ConfigError where there is neither."""
        value = self._values.pop(key, None)
        if value is None and not default:
            raise ConfigError(f"config {key} is missing")
        return default[0] if value is None else value

    def expect(self, key: str, *accepted: Any) -> None:
        """The key is absent or has one of the accepted values."""
        if key in self._values:
            value = self._values.pop(key)
            if value not in accepted:
                names = ", ".join(repr(one) for one in accepted)
                raise ConfigError(f"config {key} = {value!r} is not supported for this family: must be {names}")

    def done(self) -> None:
        if self._values:
            listed = ", ".join(f"{key} = {value!r}" for key, value in sorted(self._values.items()))
            raise ConfigError(f"config keys that are not understood: {listed}")


@dataclass(frozen=True)
class Family:
    """A family is a model_type, a reading of its config, and a map of tensor names.

    `names` holds (theirs, ours) with {i} for the layer number; `ignored` holds patterns of tensors without meaning.
    """

    model_type: str
    read: Callable[[ConfigReader], DecoderConfig]
    names: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...] = ()

    def config(self, values: Mapping[str, Any]) -> DecoderConfig:
        reader = ConfigReader(values)
        config = self.read(reader)
        reader.done()
        return config

    def our_name(self, theirs: str) -> str | None:
        """Our name of one of their tensors; None for one to ignore; their own name where it is unknown."""
        if any(re.fullmatch(pattern, theirs) for pattern in self.ignored):
            return None
        for pattern, ours in self.names:
            match = re.fullmatch(re.escape(pattern).replace(r"\{i\}", r"(\d+)"), theirs)
            if match:
                return ours.format(i=match.group(1)) if match.groups() else ours
        return theirs
