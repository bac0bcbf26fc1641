"""`pellucid info`, `pellucid health` and `pellucid cancel`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from pellucid_client.commands.common import Commands, add_command, connect, positive_seconds
from pellucid_client.commands.output import print_json, printable, write
from pellucid_client.results import Sampling
from pellucid_client.served import Load, Model, ServerInfo


def add_parsers(commands: Commands) -> None:
    info = add_command(commands, "info", _info, "show the server, its models and its load")
    info.add_argument("--json", action="store_true", help="print one JSON object")

    health = add_command(
        commands, "health", _health, "ask whether the server takes requests", "Exit code 0: it does; 1: it does not."
    )
    health.add_argument(
        "--wait", type=positive_seconds, metavar="SECONDS", help="wait so long for it; it need not be running yet"
    )

    cancel = add_command(
        commands,
        "cancel",
        _cancel,
        "end a request that is in flight",
        "Exit code 1: no request of this id is in flight.",
    )
    cancel.add_argument("request_id", metavar="ID", help="the id sent with the request, or shown in its answer")


def _info(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        server = client.server_info(timeout=arguments.timeout)
        models = client.models(timeout=arguments.timeout)
        load = client.load(timeout=arguments.timeout)
    if arguments.json:
        print_json({"address": arguments.server, "server": server, "models": models, "load": load})
        return 0
    sections = [_server_rows(arguments.server, server), *map(_model_rows, models), _load_rows(load)]
    write("\n\n".join(_table(rows) for rows in sections) + "\n")
    return 0


def _health(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        if arguments.wait is not None:
            client.wait_until_ready(arguments.wait)
            ready = True
        else:
            ready = client.is_ready(timeout=arguments.timeout)
    write("ready\n" if ready else "not ready\n")
    return 0 if ready else 1


def _cancel(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        cancelled = client.cancel(arguments.request_id, timeout=arguments.timeout)
    write("cancelled\n" if cancelled else "not found\n")
    return 0 if cancelled else 1


Rows = list[tuple[str, str]]


def _server_rows(address: str, server: ServerInfo) -> Rows:
    return [
        ("Server", address),
        ("version", f"{server.version} (API revision {server.schema_revision})"),
        ("instance", server.instance_id),
        ("uptime", f"{server.uptime:.0f} s"),
        ("device", f"{server.device}, {server.dtype}, {server.kernels} kernels"),
        ("batch-invariant", "yes" if server.batch_invariant else "no"),
        ("requests", f"{server.max_running_requests} running, {server.max_queued_requests} waiting at most"),
        ("step", f"{server.max_batched_tokens} tokens at most"),
        (
            "KV cache",
            f"{server.kv_block_count * server.kv_block_size} tokens "
            f"({server.kv_block_count} blocks of {server.kv_block_size})",
        ),
    ]


def _model_rows(model: Model) -> Rows:
    return [
        ("Model", model.name),
        ("context", f"{model.max_context_tokens} tokens"),
        (
            "output",
            f"at most {model.max_output_tokens} tokens a request; where the window slides, past the context too",
        ),
        ("vocabulary", f"{model.vocab_size} tokens"),
        ("end tokens", _listed(model.eos_token_ids)),
        ("sampling", f"{_sampling(model.default_sampling)} by default"),
        ("features", ", ".join(model.features) or "none"),
        ("logprobs", f"at most {model.max_top_logprobs} of the likeliest tokens beside each"),
        ("tokenizer", f"sha256 {model.tokenizer_sha256[:16]}…" if model.tokenizer_sha256 else "none: token ids only"),
    ]


def _sampling(sampling: Sampling) -> str:
    names = ["temperature", "top_k", "top_p", "min_p", "typical_p"]
    names += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
    return ", ".join(f"{name} {_number(getattr(sampling, name))}" for name in names)


def _load_rows(load: Load) -> Rows:
    return [
        ("Load", "draining" if load.draining else "open"),
        ("running", f"{load.running_request_count} requests, {load.running_token_count} tokens"),
        ("waiting", f"{load.queued_request_count} requests, {load.queued_token_count} tokens"),
        ("KV blocks", f"{load.used_kv_block_count} of {load.kv_block_count} used"),
    ]


def _table(rows: Rows) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {printable(value)}" for name, value in rows)


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values)) or "none"


def _number(value: float | None) -> str:
    return "unset" if value is None else f"{value:.10g}"
