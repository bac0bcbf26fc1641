"""The gRPC server: channel options and the registration of all services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import grpc

from pellucid_server.delivery import MAX_MESSAGE_BYTES
from pellucid_server.rpc import health, inference, models, reflection, server_info, tokenizer
from pellucid_server.rpc.calls import Calls
from pellucid_server.rpc.health import Health

SPARE_STREAMS = 256
"""Streams per connection beyond what is admitted: refusals, health checks and the like are never held up."""

SERVICES = (inference.SERVICE, tokenizer.SERVICE, models.SERVICE, server_info.SERVICE)

Methods = dict[str, "grpc.RpcMethodHandler[bytes, bytes]"]
"""Handlers of one service by method name."""


class Service(Protocol):
    """What each of Pellucid's services is to the server."""

    def handlers(self, calls: Calls) -> Methods: ...


def new_server(max_live: int, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A server that is not started yet. `max_live` requests may be in flight."""
    return grpc.aio.server(
        interceptors=interceptors,
        options=(
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", max_live + SPARE_STREAMS),
            # Two servers on one port would share its connections at random.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            # Clients may ping every second, with and without calls in progress.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
            # Old connections are asked to leave, so that clients find new replicas; their calls may finish.
            ("grpc.max_connection_age_ms", 600_000),
        ),
    )


def add_services(
    server: grpc.aio.Server,
    health_service: Health,
    handlers: Mapping[str, Methods],
) -> None:
    """Registers Pellucid's services, health and reflection."""
    health_service.add_to(server)
    for name, methods in handlers.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
    reflection.add_reflection(server, (*SERVICES, health.SERVICE))
