"""The engine's end of the socket pair: whole messages in, whole messages out, never in the middle of a step.

Messages go in their order. One that can wait is held for the next, so that the frontend wakes up once for both. One
that is posted goes out beside the next steps: a frontend that wakes up may take the processor of whom it hears from.
"""

from __future__ import annotations

import select
import socket

from pellucid_server.engine.framing import Frames, frame
from pellucid_server.engine.messages import FromEngine, ToEngine, decode_to_engine


class ConnectionClosed(Exception):
    """The frontend is gone."""


class EngineConnection:
    """Reads what has arrived without waiting, or waits for something to arrive."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = Frames(decode_to_engine)
        self._held = b""
        self._is_posted = False

    def fileno(self) -> int:
        """A descriptor that can be read when a message has arrived."""
        return self._socket.fileno()

    def receive(self, timeout: float | None) -> list[ToEngine]:
        """All messages that are there; where there is none, wait up to `timeout` seconds for one (None: for ever).

        What is held is sent before a wait without end. Raises ConnectionClosed.
        """
        if timeout is None:
            self.flush()
        messages: list[ToEngine] = []
        while True:
            readable, _, _ = select.select([self._socket], [], [], 0 if messages else timeout)
            if not readable:
                return messages
            try:
                part = self._socket.recv(1 << 20)
            except ConnectionResetError:  # it went without having read everything
                part = b""
            if not part:
                raise ConnectionClosed
            messages += self._frames.push(part)

    def hold(self, message: FromEngine) -> None:
        """Send it with the next one, or when what is held is flushed."""
        self._held += frame(message)

    def post(self, message: FromEngine) -> None:
        """Send it, and what is held, beside the next steps, or when what is held is flushed."""
        self.hold(message)
        self._is_posted = True

    @property
    def posted(self) -> bytes:
        """For whoever can write it beside something else, and then says so (`sent`)."""
        return self._held if self._is_posted else b""

    def sent(self, count: int) -> None:
        """So many bytes of what is posted have been written elsewhere. Send the rest. Raises ConnectionClosed."""
        if self._is_posted:
            self._held = self._held[count:]
            self.flush()

    def send(self, message: FromEngine) -> None:
        """Raises ConnectionClosed."""
        self.hold(message)
        self.flush()

    def flush(self) -> None:
        """Send what is held. Raises ConnectionClosed."""
        held, self._held, self._is_posted = self._held, b"", False
        if not held:
            return
        try:
            self._socket.sendall(held)
        except (BrokenPipeError, ConnectionResetError):
            raise ConnectionClosed from None
