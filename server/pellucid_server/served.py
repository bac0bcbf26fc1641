"""The model that is served, as rpc sees it: what the checkpoint says, what the engine made of it, what settings add."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any

from pellucid_model.tokenizers import Tokenizer
from pellucid_server.chat import ChatPrompter
from pellucid_server.checkpoint_info import CheckpointInfo, SamplingDefaults
from pellucid_server.engine.messages import Ready
from pellucid_server.kv.window import ContextWindow
from pellucid_server.ranges import SAMPLING
from pellucid_server.settings import Settings
from pellucid_server.text.stop_ids import StopIds

MAX_SEQUENCES = 64
"""Largest sequence_count."""


@dataclass(frozen=True)
class DefaultSampling:
    """What unset sampling fields come to, from operator, checkpoint and these built-in values."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True)
class ServedModel:
    """One loaded model with its limits and defaults."""

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    eos_ids: tuple[int, ...]
    context_length: int
    """Trained context N in tokens."""
    block_size: int
    """Tokens per KV block."""
    block_count: int
    native_window: int
    """The widest window of a model all of whose layers have one; else 0."""
    can_roll: bool
    """Whether the model's positions allow a rolling window."""
    longest_token: int
    """Bytes of the tokenizer's longest token; 0 without a tokenizer."""
    stop_ids: StopIds | None
    """None without a tokenizer."""
    sampling: DefaultSampling
    default_max_new_tokens: int
    max_new_tokens_limit: int
    overflow: str
    """The policy where a request names none: "auto", "reject", "truncate", "roll" or "reencode"."""
    chat: ChatPrompter | None = None
    """None: the checkpoint has no chat template that can be used."""
    prefix_cache: bool = True
    max_logprobs: int = 20
    """Largest top_count of log-probabilities."""
    max_sequences: int = MAX_SEQUENCES
    """Largest sequence_count."""

    @property
    def bos_id(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.bos_id

    @property
    def cache_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.block_size * self.block_count

    def can_hold(self, context: ContextWindow, length: int) -> bool:
        """Whether the KV cache is large enough for a sequence of `length` tokens, or for its window."""
        return context.blocks_needed(length, self.block_size, self.native_window) <= self.block_count


def served_model(
    settings: Settings,
    checkpoint: CheckpointInfo,
    tokenizer: Tokenizer | None,
    longest_token: int,
    stop_ids: StopIds | None,
    ready: Ready,
    chat: ChatPrompter | None = None,
) -> ServedModel:
    """Puts the parts together once the engine is ready. End ids beyond the vocabulary are left out."""
    eos_ids = {*checkpoint.eos_ids, *(tokenizer.eos_ids if tokenizer is not None else ())}
    return ServedModel(
        name=checkpoint.name,
        tokenizer=tokenizer,
        vocab_size=ready.vocab_size,
        eos_ids=tuple(sorted(token_id for token_id in eos_ids if token_id < ready.vocab_size)),
        context_length=ready.context_length,
        block_size=ready.kv_block_size,
        block_count=ready.kv_block_count,
        native_window=ready.native_window,
        can_roll=ready.position_scheme != "absolute",
        longest_token=longest_token,
        stop_ids=stop_ids,
        sampling=default_sampling(
            SamplingDefaults(**{name: getattr(settings, f"default_{name}") for name in SAMPLING}),
            checkpoint.sampling,
        ),
        default_max_new_tokens=settings.default_max_new_tokens,
        max_new_tokens_limit=settings.max_new_tokens_limit,
        overflow=settings.context_overflow,
        chat=chat,
        prefix_cache=settings.prefix_cache,
        max_logprobs=min(settings.max_logprobs, ready.vocab_size),
        max_sequences=min(MAX_SEQUENCES, settings.max_running + settings.max_queue),
    )


def default_sampling(operator: SamplingDefaults, model: SamplingDefaults) -> DefaultSampling:
    """The chain operator, model, built-in. Values are rounded to the API's float32, so that an echoed value sent back
    means the same."""
    values: dict[str, Any] = {}
    for field in fields(DefaultSampling):
        candidates = (getattr(operator, field.name), getattr(model, field.name), field.default)
        values[field.name] = _as_sent(next(value for value in candidates if value is not None))
    return DefaultSampling(**values)


def _as_sent(value: Any) -> Any:
    """A number as it comes through the API: whole ones as they are, others as float32."""
    return value if isinstance(value, int) else struct.unpack("<f", struct.pack("<f", value))[0]
