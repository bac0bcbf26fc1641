"""The engine's end of the socket pair: whole messages in, whole messages out, never in the middle of a step."""

from __future__ import annotations

import select
import socket

from pellucid_server.engine.messages import LENGTH, FromEngine, ToEngine, decode_to_engine, frame


class ConnectionClosed(Exception):
    """The frontend is gone."""


class EngineConnection:
    """Reads what has arrived without waiting, or waits for something to arrive."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()

    def receive(self, timeout: float | None) -> list[ToEngine]:
        """All messages that are there; where there is none, wait up to `timeout` seconds for one (None: for ever).

        Raises ConnectionClosed.
        """
        messages: list[ToEngine] = []
        while True:
            messages += self._whole_messages()
            readable, _, _ = select.select([self._socket], [], [], 0 if messages else timeout)
            if not readable:
                return messages
            part = self._socket.recv(1 << 20)
            if not part:
                raise ConnectionClosed
            self._received += part

    def send(self, message: FromEngine) -> None:
        """Raises ConnectionClosed."""
        try:
            self._socket.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            raise ConnectionClosed from None

    def _whole_messages(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        start = 0
        while len(self._received) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received, start)
            end = start + LENGTH.size + length
            if end > len(self._received):
                break
            messages.append(decode_to_engine(self._received[start + LENGTH.size : end]))
            start = end
        del self._received[:start]
        return messages
