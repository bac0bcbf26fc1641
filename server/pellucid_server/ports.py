"""Taking the ports to listen on, with an error for people where one cannot be had."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from wsgiref.simple_server import WSGIServer

import grpc
from prometheus_client import CollectorRegistry, start_http_server

from pellucid_server.errors import StartError
from pellucid_server.options import Address


def bind_grpc(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None = None) -> int:
    """The port that was bound, with TLS where there are credentials; raises StartError."""
    _check_free(address, "--listen")
    try:
        port: int = (
            server.add_insecure_port(str(address))
            if credentials is None
            else server.add_secure_port(str(address), credentials)
        )
    except RuntimeError:
        raise StartError(f"cannot listen on {address}; choose another --listen") from None
    return port


def serve_metrics(address: Address | None, registry: CollectorRegistry) -> WSGIServer | None:
    """Serves the registry from a thread that ends with the process; raises StartError. None where metrics are off."""
    if address is None:
        return None
    try:
        server, _ = start_http_server(address.port, address.host, registry)
    except OSError as error:
        raise _unusable(address, "--metrics-listen", error) from None
    return server


def _check_free(address: Address, flag: str) -> None:
    """gRPC says only that it failed, and that on standard error; a plain bind beforehand says why."""
    try:
        candidates = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = candidates[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        raise _unusable(address, flag, error) from None


def _unusable(address: Address, flag: str, error: OSError) -> StartError:
    # Name resolution reports numbers of its own, with their text in place.
    reason = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    remedy = "stop what uses it or " if error.errno == errno.EADDRINUSE else ""
    return StartError(f"cannot listen on {address}: {reason}; {remedy}choose another {flag}")
