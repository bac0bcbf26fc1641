"""What the client hands back: frozen dataclasses under the field names of the public contract.

In: messages of pellucid.v1. Out: durations as float seconds, repeated fields as tuples, unset fields as None.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from pellucid.v1 import inference_pb2, model_pb2, server_pb2, tokenizer_pb2, types_pb2


def to_seconds(duration: Duration) -> float:
    return (duration.seconds * 10**9 + duration.nanos) / 10**9  # As whole numbers, so that it is rounded once.


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 0.8, not 0.800000011920929."""
    for digits in range(6, 9):
        rounded = float(f"{value:.{digits}g}")
        if struct.unpack("f", struct.pack("f", rounded))[0] == value:
            return rounded
    return float(f"{value:.9g}")


def _seconds(message: Message, field: str) -> float | None:
    return to_seconds(getattr(message, field)) if message.HasField(field) else None


def _enum_value(enum: EnumTypeWrapper, prefix: str, number: int) -> str:
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
    seed: int | None

    @staticmethod
    def from_message(message: types_pb2.SamplingParams) -> Sampling:
        return Sampling(
            temperature=_shortest(message.temperature) if message.HasField("temperature") else None,
            top_k=message.top_k if message.HasField("top_k") else None,
            top_p=_shortest(message.top_p) if message.HasField("top_p") else None,
            min_p=_shortest(message.min_p) if message.HasField("min_p") else None,
            seed=message.seed if message.HasField("seed") else None,
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
    dropped_token_count: int
    """Prompt tokens that the model does not see, by the context policy."""
    token_ids: tuple[int, ...]
    """The prompt's tokens. Empty unless return_prompt_token_ids."""
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
            dropped_token_count=message.dropped_token_count,
            token_ids=tuple(message.token_ids),
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
            context=_enum_value(inference_pb2.ContextOverflow, "CONTEXT_OVERFLOW_", context.overflow),
            window_tokens=context.window_tokens if context.HasField("window_tokens") else None,
            sink_tokens=context.sink_tokens if context.HasField("sink_tokens") else None,
            hop_tokens=context.hop_tokens if context.HasField("hop_tokens") else None,
        )


@dataclass(frozen=True)
class Finish:
    """Why the sequence ended."""

    reason: str
    """"eos", "stop_token", "stop_string", "max_new_tokens", "context_full", "time_limit" or "cancelled"."""
    matched: int | str | None
    """The end or stop token's id, or the stop string."""
    output_token_count: int
    """End and stop tokens included."""

    @staticmethod
    def from_message(message: inference_pb2.Finish) -> Finish:
        which = message.WhichOneof("matched")
        return Finish(
            reason=_enum_value(inference_pb2.FinishReason, "FINISH_REASON_", message.reason),
            matched=None if which is None else getattr(message, which),
            output_token_count=message.output_token_count,
        )


@dataclass(frozen=True)
class Chunk:
    """One message of the stream. It may have ids and no text, or text and no ids: do not pair them up."""

    text: str
    """Whole characters, to be appended to what came before."""
    token_ids: tuple[int, ...]
    """Exactly the sampled ids."""
    finish: Finish | None
    """Set in the last chunk."""

    @staticmethod
    def from_message(message: inference_pb2.GenerateResponse) -> Chunk:
        finish = next((Finish.from_message(each.finish) for each in message.outputs if each.HasField("finish")), None)
        return Chunk(
            text="".join(each.text for each in message.outputs),
            token_ids=tuple(id_ for each in message.outputs for id_ in each.token_ids),
            finish=finish,
        )


@dataclass(frozen=True)
class Usage:
    """Token counts of the whole request."""

    prompt_token_count: int
    output_token_count: int

    @staticmethod
    def from_message(message: inference_pb2.Usage) -> Usage:
        return Usage(message.prompt_token_count, message.output_token_count)


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
    """A whole answer: the sum of a stream's chunks."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    prompt: PromptInfo
    usage: Usage
    timings: Timings


@dataclass(frozen=True)
class Tokenization:
    """One text's tokens."""

    token_ids: tuple[int, ...]
    tokens: tuple[bytes, ...]
    """The bytes that each token stands for; they need not be whole characters. Empty unless return_tokens."""

    @staticmethod
    def from_message(message: tokenizer_pb2.Tokenization) -> Tokenization:
        return Tokenization(tuple(message.token_ids), tuple(message.tokens))


@dataclass(frozen=True)
class Model:
    """A model that the server has loaded."""

    name: str
    max_context_tokens: int
    """Trained context: prompt and output together."""
    max_output_tokens: int
    """The operator's limit on max_new_tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Sampling
    """What a request gets where it leaves a value unset."""
    tokenizer_sha256: str
    """Hex digest of tokenizer.json. Empty: the model takes token ids only."""

    @staticmethod
    def from_message(message: model_pb2.Model) -> Model:
        return Model(
            name=message.name,
            max_context_tokens=message.max_context_tokens,
            max_output_tokens=message.max_output_tokens,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            default_sampling=Sampling.from_message(message.default_sampling),
            tokenizer_sha256=message.tokenizer_sha256,
        )


@dataclass(frozen=True)
class ServerInfo:
    """What does not change while the server runs, and its uptime."""

    version: str
    schema_revision: int
    """Grows by one with each addition to the API."""
    instance_id: str
    uptime: float
    """Seconds."""
    max_running_requests: int
    max_queued_requests: int
    max_batched_tokens: int
    """Tokens that one step computes at the most."""
    kv_block_size: int
    """Tokens per block."""
    kv_block_count: int
    device: str
    dtype: str
    kernels: str
    batch_invariant: bool
    """Whether a request's tokens are bit for bit the same alone and in company."""

    @staticmethod
    def from_message(message: server_pb2.GetServerInfoResponse) -> ServerInfo:
        return ServerInfo(
            version=message.version,
            schema_revision=message.schema_revision,
            instance_id=message.instance_id,
            uptime=to_seconds(message.uptime),
            max_running_requests=message.max_running_requests,
            max_queued_requests=message.max_queued_requests,
            max_batched_tokens=message.max_batched_tokens,
            kv_block_size=message.kv_block_size,
            kv_block_count=message.kv_block_count,
            device=message.device,
            dtype=message.dtype,
            kernels=message.kernels,
            batch_invariant=message.batch_invariant,
        )


@dataclass(frozen=True)
class Load:
    """What the server is doing now."""

    running_request_count: int
    queued_request_count: int
    used_kv_block_count: int
    kv_block_count: int
    running_token_count: int
    """Tokens that running requests hold in the KV cache."""
    queued_token_count: int
    """Prompt tokens of waiting requests."""
    draining: bool
    """The server is shutting down and takes no new requests."""

    @staticmethod
    def from_message(message: server_pb2.GetLoadResponse) -> Load:
        return Load(
            running_request_count=message.running_request_count,
            queued_request_count=message.queued_request_count,
            used_kv_block_count=message.used_kv_block_count,
            kv_block_count=message.kv_block_count,
            running_token_count=message.running_token_count,
            queued_token_count=message.queued_token_count,
            draining=message.draining,
        )
