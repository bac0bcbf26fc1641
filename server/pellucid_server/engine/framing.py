"""How messages lie on the socket between frontend and engine: a little-endian 32-bit length, then msgpack.

In: messages, and bytes as they arrive, however cut. Out: bytes, and whole messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Generic, TypeVar

from pellucid_server.engine.messages import FromEngine, ToEngine, encode

Message = TypeVar("Message")

LENGTH = struct.Struct("<I")
"""What precedes every message: its size in bytes."""


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as it goes over the wire."""
    body = encode(message)
    return LENGTH.pack(len(body)) + body


class Frames(Generic[Message]):
    """One direction of one connection. `decode` raises msgspec.MsgspecError for what is no message."""

    def __init__(self, decode: Callable[[bytearray], Message]) -> None:
        self._decode = decode
        self._received = bytearray()

    def push(self, part: bytes | memoryview) -> list[Message]:
        """The messages that are whole with this part."""
        received = self._received
        received += part
        messages: list[Message] = []
        start = 0
        while len(received) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(received, start)
            begin, end = start + LENGTH.size, start + LENGTH.size + length
            if end > len(received):
                break
            messages.append(self._decode(received[begin:end]))
            start = end
        del received[:start]
        return messages
