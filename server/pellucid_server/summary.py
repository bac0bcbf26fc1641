"""What the operator reads when the server is ready."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from wsgiref.simple_server import WSGIServer

from pellucid_server.checkpoint_info import CheckpointInfo
from pellucid_server.engine.messages import Ready
from pellucid_server.logs import log
from pellucid_server.options import size_text
from pellucid_server.security import protection
from pellucid_server.served import ServedModel
from pellucid_server.settings import Settings


@dataclass(frozen=True)
class Addresses:
    """Where the server listens, ports resolved."""

    grpc: str
    metrics: str | None

    @staticmethod
    def bound(settings: Settings, grpc_port: int, metrics_server: WSGIServer | None) -> Addresses:
        metrics = None
        if settings.metrics_listen is not None and metrics_server is not None:
            metrics = str(replace(settings.metrics_listen, port=metrics_server.server_port))
        return Addresses(str(replace(settings.listen, port=grpc_port)), metrics)


def log_summary(
    settings: Settings, checkpoint: CheckpointInfo, model: ServedModel, ready: Ready, addresses: Addresses
) -> None:
    """One event with everything, then a notice each."""
    log(
        logging.INFO,
        "serving",
        block=True,
        model=model.name,
        architecture=ready.architecture,
        parameters=f"{ready.parameters:,}",
        dtype=ready.dtype,
        device=ready.device,
        kernels=ready.kernels,
        context=f"{model.context_length} tokens",
        weights=size_text(ready.weight_bytes),
        kv_cache=f"{model.cache_tokens} tokens in {ready.kv_block_count} blocks, {size_text(ready.kv_bytes)}",
        grpc=addresses.grpc,
        security=protection(settings),
        metrics=addresses.metrics or "off",
    )
    for notice in (*checkpoint.notices, *ready.notices, *_own_notices(checkpoint, model, ready)):
        log(logging.WARNING, notice)


def _own_notices(checkpoint: CheckpointInfo, model: ServedModel, ready: Ready) -> list[str]:
    notices = []
    beyond = [token_id for token_id in checkpoint.eos_ids if token_id >= ready.vocab_size]
    if beyond:
        notices.append(f"the model has {ready.vocab_size} token ids; end tokens beyond them never come: {beyond}")
    if model.tokenizer is None:
        notices.append("the checkpoint has no tokenizer.json: prompts are token ids, and answers have no text")
    if model.cache_tokens < model.context_length:
        notices.append(
            f"the KV cache holds {model.cache_tokens} tokens, less than the context of {model.context_length}: a "
            "request ends when it fills the cache, unless its window is smaller; raise --kv-cache-memory"
        )
    if not ready.batch_invariant:
        notices.append(
            "torch's operators take part in steps, so a request's numbers may differ in their last bits with the "
            "requests beside it"
        )
    return notices
