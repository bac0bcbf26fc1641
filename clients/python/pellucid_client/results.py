"""What comes back of `generate`: frozen dataclasses under the field names of the public contract.

In: messages of pellucid.v1. Out: durations as float seconds, repeated fields as tuples, unset fields as None.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from pellucid.v1 import inference_pb2, types_pb2


def to_seconds(duration: Duration) -> float:
    return (duration.seconds * 10**9 + duration.nanos) / 10**9  # As whole numbers, so that it is rounded once.


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 0.8, not 0.800000011920929."""
    for digits in range(6, 9):
        rounded = float(f"{value:.{digits}g}")
        if struct.unpack("f", struct.pack("f", rounded))[0] == value:
            return rounded
    return float(f"{value:.9g}")


def _scalar(message: Message, field: str) -> Any:
    """None where it is unset."""
    if not message.HasField(field):
        return None
    value = getattr(message, field)
    return _shortest(value) if isinstance(value, float) else value


def _seconds(message: Message, field: str) -> float | None:
    return to_seconds(getattr(message, field)) if message.HasField(field) else None


def enum_value(enum: EnumTypeWrapper, prefix: str, number: int) -> str:
    """FINISH_REASON_EOS -> "eos". A value that only a newer server knows stays a number."""
    try:
        return enum.Name(number).removeprefix(prefix).lower()
    except ValueError:
        return str(number)


@dataclass(frozen=True)
class Sampling:
    """Sampling values in force; None where the server did not say."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    sequence_count: int | None
    logit_bias: tuple[tuple[int, float], ...]
    """(token id, bias), by id."""
    allowed_token_ids: tuple[int, ...]
    """Empty: all."""

    @staticmethod
    def from_message(message: types_pb2.SamplingParams) -> Sampling:
        return Sampling(
            **{field.name: _scalar(message, field.name) for field in message.DESCRIPTOR.fields if field.has_presence},
            logit_bias=tuple((token_id, _shortest(bias)) for token_id, bias in sorted(message.logit_bias.items())),
            allowed_token_ids=tuple(message.allowed_token_ids),
        )


@dataclass(frozen=True)
class TokenAlternative:
    """A token that could have stood in another one's place."""

    token_id: int
    logprob: float
    rank: int
    """1 = the likeliest."""
    token: bytes
    """What it adds to the text; need not be whole characters."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token's place in the model's own distribution, before bias, penalties, temperature and filters."""

    token_id: int
    logprob: float | None
    """Natural logarithm; None for the first prompt token, which nothing precedes."""
    rank: int
    """1 = the likeliest; 0 where logprob is None."""
    token: bytes
    """What it adds to the text; need not be whole characters."""
    alternatives: tuple[TokenAlternative, ...]
    """The likeliest tokens in their order, then those asked for by id."""


def _logprobs(messages: Iterable[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=each.token_id,
            logprob=each.logprob if each.HasField("logprob") else None,
            rank=each.rank,
            token=each.token,
            alternatives=tuple(TokenAlternative(a.token_id, a.logprob, a.rank, a.token) for a in each.alternatives),
        )
        for each in messages
    )


@dataclass(frozen=True)
class Stopping:
    """Stopping rules in force."""

    max_new_tokens: int
    """Tokens this request may make at the most, after the room that the context leaves."""
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    """The model's end tokens included, unless ignore_eos."""
    include_stop_in_text: bool
    ignore_eos: bool
    time_limit: float | None
    """Seconds."""


@dataclass(frozen=True)
class PromptInfo:
    """What the server made of the request. Comes with the first chunk."""

    request_id: str
    model: str
    prompt_token_count: int
    """Tokens of the prompt as it was sent, BOS included."""
    cached_token_count: int
    """Those of them that were found in the server's cache."""
    dropped_token_count: int
    """Prompt tokens that the model does not see, by the context policy."""
    token_ids: tuple[int, ...]
    """The prompt's tokens. Empty unless return_prompt_token_ids."""
    logprobs: tuple[TokenLogprob, ...]
    """One per prompt token from prompt_logprobs_start on. Empty unless prompt_logprobs."""
    sampling: Sampling
    stopping: Stopping
    context: str
    """The policy in force: "reject", "truncate", "roll" or "reencode"."""
    window_tokens: int | None
    """Newest tokens that stay visible; None where the context does not slide."""
    sink_tokens: int | None
    """First tokens that stay visible; None where the context does not slide."""
    hop_tokens: int | None
    """Tokens dropped at a time under "reencode", else None."""

    @staticmethod
    def from_message(message: inference_pb2.PromptInfo) -> PromptInfo:
        stopping, context = message.effective_stopping, message.effective_context
        return PromptInfo(
            request_id=message.request_id,
            model=message.model,
            prompt_token_count=message.prompt_token_count,
            cached_token_count=message.cached_token_count,
            dropped_token_count=message.dropped_token_count,
            token_ids=tuple(message.token_ids),
            logprobs=_logprobs(message.logprobs),
            sampling=Sampling.from_message(message.effective_sampling),
            stopping=Stopping(
                max_new_tokens=message.effective_max_new_tokens,
                min_new_tokens=stopping.min_new_tokens,
                stop=tuple(stopping.stop_strings),
                stop_token_ids=tuple(stopping.stop_token_ids),
                include_stop_in_text=stopping.include_stop_in_text,
                ignore_eos=stopping.ignore_eos,
                time_limit=_seconds(stopping, "time_limit"),
            ),
            context=enum_value(inference_pb2.ContextOverflow, "CONTEXT_OVERFLOW_", context.overflow),
            window_tokens=context.window_tokens if context.HasField("window_tokens") else None,
            sink_tokens=context.sink_tokens if context.HasField("sink_tokens") else None,
            hop_tokens=context.hop_tokens if context.HasField("hop_tokens") else None,
        )


@dataclass(frozen=True)
class Finish:
    """Why the sequence ended."""

    reason: str
    """"eos", "stop_token", "stop_string", "max_new_tokens", "context_full", "time_limit", "constraint_done",
    "no_token" or "cancelled"."""
    matched: int | str | None
    """The end or stop token's id, or the stop string."""
    output_token_count: int
    """End and stop tokens included."""

    @staticmethod
    def from_message(message: inference_pb2.Finish) -> Finish:
        which = message.WhichOneof("matched")
        return Finish(
            reason=enum_value(inference_pb2.FinishReason, "FINISH_REASON_", message.reason),
            matched=None if which is None else getattr(message, which),
            output_token_count=message.output_token_count,
        )


@dataclass(frozen=True)
class Chunk:
    """New output of one sequence. It may have ids and no text, or text and no ids: do not pair them up."""

    text: str
    """Whole characters, to be appended to what came before."""
    token_ids: tuple[int, ...]
    """Exactly the sampled ids."""
    finish: Finish | None
    """Set in the last chunk of the sequence."""
    index: int = 0
    """Which sequence, from 0 to n - 1."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per sampled id. Empty unless logprobs."""

    @staticmethod
    def from_message(message: inference_pb2.OutputDelta) -> Chunk:
        return Chunk(
            text=message.text,
            token_ids=tuple(message.token_ids),
            finish=Finish.from_message(message.finish) if message.HasField("finish") else None,
            index=message.sequence_index,
            logprobs=_logprobs(message.logprobs) if message.logprobs else (),
        )


@dataclass(frozen=True)
class Output:
    """One sequence: the sum of its chunks."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None
    """None until the sequence has ended."""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of the whole request."""

    prompt_token_count: int
    output_token_count: int
    """Of all sequences."""
    cached_token_count: int
    """Prompt tokens that were found in the server's cache."""

    @staticmethod
    def from_message(message: inference_pb2.Usage) -> Usage:
        return Usage(message.prompt_token_count, message.output_token_count, message.cached_token_count)


@dataclass(frozen=True)
class Timings:
    """Where the time went, in seconds, measured in the server from admission. None: there was no such moment."""

    queue_time: float | None
    prefill_time: float | None
    time_to_first_token: float | None
    decode_time: float | None
    total_time: float | None
    preemption_count: int
    """Times the sequence gave its KV blocks to others and was computed again."""
    window_move_count: int
    """Times the context window moved while the output was made."""
    engine_recovery_count: int
    """Times the stream was carried over a restarted engine."""

    @staticmethod
    def from_message(message: inference_pb2.Timings) -> Timings:
        return Timings(
            queue_time=_seconds(message, "queue_time"),
            prefill_time=_seconds(message, "prefill_time"),
            time_to_first_token=_seconds(message, "time_to_first_token"),
            decode_time=_seconds(message, "decode_time"),
            total_time=_seconds(message, "total_time"),
            preemption_count=message.preemption_count,
            window_move_count=message.window_move_count,
            engine_recovery_count=message.engine_recovery_count,
        )


@dataclass(frozen=True)
class Completion:
    """A whole answer: the sum of a stream's chunks. `text`, `token_ids`, `finish` and `logprobs` are those of the first
    sequence; `outputs` has them all.
    """

    outputs: tuple[Output, ...]
    finish: Finish
    prompt: PromptInfo
    usage: Usage
    timings: Timings

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.outputs[0].logprobs
