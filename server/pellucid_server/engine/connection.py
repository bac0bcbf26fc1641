"""The engine's end of the socket pair: whole messages in, whole messages out, never in the middle of a step."""

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

    def receive(self, timeout: float | None) -> list[ToEngine]:
        """All messages that are there; where there is none, wait up to `timeout` seconds for one (None: for ever).

        Raises ConnectionClosed.
        """
        messages: list[ToEngine] = []
        while True:
            readable, _, _ = select.select([self._socket], [], [], 0 if messages else timeout)
            if not readable:
                return messages
            part = self._socket.recv(1 << 20)
            if not part:
                raise ConnectionClosed
            messages += self._frames.push(part)

    def send(self, message: FromEngine) -> None:
        """Raises ConnectionClosed."""
        try:
            self._socket.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            raise ConnectionClosed from None
