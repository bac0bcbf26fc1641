"""What every call has in common: parsing, request id, response headers, errors as statuses, the count by status.

A behaviour gets a parsed message and a `Call`. Whatever it raises becomes a status here: the exception tree through
rpc.errors, and anything else INTERNAL without a word of the inside, which is logged with the request id.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import quote

import grpc
from google.protobuf.message import Message

from pellucid_server.delivery import MAX_MESSAGE_BYTES
from pellucid_server.errors import DeadlineExceeded, InternalError, RequestTooLarge, ServeError
from pellucid_server.logs import LOGGER, log
from pellucid_server.metrics import Metrics
from pellucid_server.requests import is_expired
from pellucid_server.rpc.errors import error_trailers, known_errors, status_code
from pellucid_server.rpc.validation import MAX_REQUEST_ID_BYTES, REQUEST_ID_HEADER
from pellucid_server.rpc.wire import parse

Context = grpc.aio.ServicerContext[bytes, bytes]
M = TypeVar("M", bound=Message)
T = TypeVar("T")

INSTANCE = "x-pellucid-instance"
GOING = 0.2
"""Seconds in which gRPC says that a call is cancelled, once it has failed to send."""


class Call:
    """One call in progress."""

    def __init__(self, context: Context, instance_id: str, caller: str = "") -> None:
        self._context = context
        self.caller = caller
        """Whose call it is; empty where callers cannot be told apart."""
        self._instance_id = instance_id
        self._began = False
        self.request_id = _header(context, REQUEST_ID_HEADER)
        """The caller's x-request-id until the request's own id is known; empty: none was given."""

    def assign_request_id(self, own: str = "") -> str:
        """The request's id: its own, else the header's, else a new one."""
        self.request_id = own or self.request_id or secrets.token_hex(8)
        return self.request_id

    @property
    def deadline(self) -> float | None:
        """On the monotonic clock."""
        remaining = self._context.time_remaining()
        return None if remaining is None else time.monotonic() + remaining

    async def send(self, message: Message) -> None:
        """Writes one message of a stream, the response headers before the first: from then on no retry is automatic.

        Raises CancelledError where the client is gone.
        """
        raw = _serialized(message)
        try:
            if not self._began:
                await self._begin()
            await self._context.write(raw)
        except grpc.aio.InternalError:
            await _wait_for_cancellation()
            raise

    async def reply(self, message: Message) -> bytes:
        """The answer of a unary call."""
        raw = _serialized(message)
        try:
            await self._begin()
        except grpc.aio.InternalError:
            await _wait_for_cancellation()
            raise
        return raw

    async def fail(self, error: ServeError) -> None:
        """Ends the call with the error's status; raises, as gRPC's abort does."""
        trailers = error_trailers(error) + (() if self._began else self._headers())
        await self._context.abort(status_code(error), error.message, trailers)

    async def _begin(self) -> None:
        self._began = True
        await self._context.send_initial_metadata(self._headers())

    def _headers(self) -> tuple[tuple[str, str], ...]:
        # Header values are printable ASCII; other characters of an id are percent-encoded.
        printable = quote(self.request_id[:MAX_REQUEST_ID_BYTES], safe="!\"#$&'()*+,/:;<=>?@[\\]^`{|} ").strip()
        return ((REQUEST_ID_HEADER, printable), (INSTANCE, self._instance_id))


class Calls:
    """Makes gRPC handlers of behaviours."""

    def __init__(
        self, instance_id: str, metrics: Metrics, identify: Callable[[Context], str] = lambda context: ""
    ) -> None:
        self._instance_id = instance_id
        self._metrics = metrics
        self._identify = identify
        self._methods: set[str] = set()
        known = known_errors()
        self._codes = {grpc.StatusCode.OK.name, grpc.StatusCode.CANCELLED.name, *(code for code, _ in known)}
        for code, reason in known:
            metrics.errors.labels(code, reason)

    def unary(
        self, method: str, kind: type[M], behaviour: Callable[[M, Call], Awaitable[Message]]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Handler of a method with one answer."""
        self._announce(method)

        async def handle(raw: bytes, context: Context) -> bytes:
            call = Call(context, self._instance_id, self._identify(context))

            async def answer() -> bytes:
                call.assign_request_id()
                return await call.reply(await behaviour(parse(raw, kind), call))

            return await self._run(method, call, answer())

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(
        self, method: str, behaviour: Callable[[bytes, Call], Awaitable[None]]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Handler of a method that streams its answer with `Call.send`.

        The behaviour parses the bytes itself, so that it can count what it refuses.
        """
        self._announce(method)

        async def handle(raw: bytes, context: Context) -> None:
            call = Call(context, self._instance_id, self._identify(context))
            await self._run(method, call, behaviour(raw, call))

        return grpc.unary_stream_rpc_method_handler(handle)

    async def _run(self, method: str, call: Call, work: Awaitable[T]) -> T:
        """Every call is counted before its client learns how it ended."""
        try:
            result = await work
        except asyncio.CancelledError:
            if is_expired(call.deadline):
                self.count_error(method, DeadlineExceeded("the deadline passed"))
            else:
                self._count(method, grpc.StatusCode.CANCELLED)
            raise
        except ServeError as error:
            self.count_error(method, error)
            self._log_refusal(method, call, error)
            await call.fail(error)
            raise
        except Exception:
            failure = InternalError(f"an error in the server ended request {call.request_id!r}")
            self.count_error(method, failure)
            fields = {"method": method, "request_id": call.request_id}
            LOGGER.exception("a call failed", extra={"fields": fields})
            await call.fail(failure)
            raise
        self._count(method, grpc.StatusCode.OK)
        return result

    def count_error(self, method: str, error: ServeError) -> None:
        """Counts a call that ended in an error; a method that is none of ours has no name here."""
        code = status_code(error)
        if method in self._methods:
            self._count(method, code)
        self._metrics.errors.labels(code.name, error.reason).inc()

    def _announce(self, method: str) -> None:
        """The method's counters exist from the start, so that the first error is a change."""
        self._methods.add(method)
        for code in self._codes:
            self._metrics.calls.labels(method, code)

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        self._metrics.calls.labels(method, code.name).inc()

    def _log_refusal(self, method: str, call: Call, error: ServeError) -> None:
        level = logging.ERROR if isinstance(error, InternalError) else logging.DEBUG
        log(level, error.message, method=method, request_id=call.request_id, reason=error.reason)


async def _wait_for_cancellation() -> None:
    """A client that goes as something is sent to it cancels its call; gRPC may first say that it cannot be sent."""
    await asyncio.sleep(GOING)


def _serialized(message: Message) -> bytes:
    """Raises RequestTooLarge where gRPC would refuse to send it."""
    raw = message.SerializeToString()
    if len(raw) > MAX_MESSAGE_BYTES:
        raise RequestTooLarge(
            f"the answer takes {len(raw)} bytes in one message, which may have {MAX_MESSAGE_BYTES}; "
            "ask for less at once, or for incremental delivery"
        )
    return raw


def _header(context: Context, name: str) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return ""
