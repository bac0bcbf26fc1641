"""Who may call, and who calls: bearer tokens on every call but health checks, known and unknown methods alike.

Whoever must have a client certificate was asked for it in the TLS handshake; here it only names the caller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health

from pellucid_server.errors import TokenInvalid, TokenMissing, Unauthenticated
from pellucid_server.metrics import Metrics
from pellucid_server.rpc.calls import Calls
from pellucid_server.rpc.errors import error_trailers, status_code
from pellucid_server.tokens import TokenFile

AUTHORIZATION = "authorization"
_OPEN = f"/{health.SERVICE_NAME}/"

Metadata = Iterable[tuple[str, str | bytes]]


class Callers:
    """Tells callers apart. `tokens`: None where none are asked for."""

    def __init__(self, tokens: TokenFile | None = None) -> None:
        self._tokens = tokens

    def identify(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> str:
        """The caller's name by token, else by certificate; empty: callers cannot be told apart here."""
        if self._tokens is not None:
            try:
                return "token " + self.check(context.invocation_metadata() or ())
            except Unauthenticated:
                return "token just taken back"
        identities: Iterable[bytes] | None = context.peer_identities()
        return "certificate " + b", ".join(identities).decode(errors="replace") if identities else ""

    def check(self, metadata: Metadata) -> str:
        """The name that belongs to the call's token. Raises Unauthenticated."""
        if self._tokens is None:
            return ""
        values = [value for key, value in metadata if key == AUTHORIZATION]
        if not values:
            raise TokenMissing('a token is required; send it as metadata: "authorization: Bearer TOKEN"')
        scheme, _, token = values[0].partition(" ") if isinstance(values[0], str) else ("", "", "")
        caller = self._tokens.caller(token.strip())
        if caller is None or scheme.lower() != "bearer" or len(values) > 1:
            raise TokenInvalid("the token is not one of this server's")
        return caller


class Gate(grpc.aio.ServerInterceptor):
    """Stops calls without a known token before anything else looks at them."""

    def __init__(self, callers: Callers, calls: Calls, metrics: Metrics) -> None:
        self._callers = callers
        self._calls = calls
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if not handler_call_details.method.startswith(_OPEN):
            try:
                self._callers.check(handler_call_details.invocation_metadata or ())
            except Unauthenticated as error:
                return self._refuse(handler_call_details.method, error)
        return await continuation(handler_call_details)

    def _refuse(self, method: str, error: Unauthenticated) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def abort(_: object, context: Any) -> NoReturn:
            self._metrics.auth_failures.inc()
            self._calls.count_error(method.rpartition("/")[2], error)
            await context.abort(status_code(error), error.message, error_trailers(error))
            raise error

        # As a stream in both directions it answers without waiting for a message, whatever the method's kind.
        return grpc.stream_stream_rpc_method_handler(abort)
