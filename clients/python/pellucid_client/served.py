"""What the client says of servers and their models: frozen dataclasses under the field names of the public contract."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.v1 import model_pb2, server_pb2, tokenizer_pb2
from pellucid_client.results import Sampling, enum_value, to_seconds


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
    features: tuple[str, ...]
    """What requests may ask for, such as "chat", "regex" and "prefix_cache"."""
    max_top_logprobs: int
    """Largest number of likeliest tokens beside each token."""

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
            features=tuple(enum_value(model_pb2.Feature, "FEATURE_", each) for each in message.features),
            max_top_logprobs=message.max_top_logprobs,
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
