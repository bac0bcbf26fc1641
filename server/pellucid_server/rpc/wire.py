"""From raw bytes to a request message, with nothing passed over in silence.

gRPC would answer UNKNOWN to bytes that are not valid protobuf; handlers take the bytes as they are and parse them here,
so that the caller learns which field is wrong. Fields that this version does not know are refused: they are a wish
that would go unheard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pellucid_server.errors import InvalidRequest, UnsupportedField, Violation

MAX_LISTED = 16
"""Violations named in one answer: it travels in trailers, which are small."""
TRAILER_BYTES = 7000
"""What they may take there. Clients refuse more than 8,192 bytes of trailers, and tell their user of that instead."""

M = TypeVar("M", bound=Message)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def parse(raw: bytes, kind: type[M]) -> M:
    """Raises InvalidRequest for bytes that are not valid, UnsupportedField for fields that are not known."""
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        field = next(_invalid_text(raw, cast(Descriptor, kind.DESCRIPTOR), ""), None)
        problem = "is not valid UTF-8" if field else "is not a valid protobuf message"
        raise InvalidRequest([Violation(field or message.DESCRIPTOR.full_name, problem)]) from None
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:  # Rare, and looking for them takes longer than all the rest.
        message.ParseFromString(raw)
        unknown = [Violation(path, "is not known to this server; leave it out") for path in _unknown(message, "")]
        if unknown:
            raise UnsupportedField(unknown[:MAX_LISTED])
    return message


def _unknown(message: Message, prefix: str) -> Iterator[str]:
    """Paths of unknown fields, by number: "sampling.field 12"."""
    fields = UnknownFieldSet(message)
    numbers = {fields[index].field_number for index in range(len(fields))}
    yield from (f"{prefix}field {number}" for number in sorted(numbers))
    for descriptor, value in message.ListFields():
        if descriptor.type != FieldDescriptor.TYPE_MESSAGE or isinstance(value, Mapping):
            continue
        if isinstance(value, Message):
            yield from _unknown(value, f"{prefix}{descriptor.name}.")
        else:
            for index, item in enumerate(value):
                yield from _unknown(item, f"{prefix}{descriptor.name}[{index}].")


def _invalid_text(raw: bytes, descriptor: Descriptor, prefix: str) -> Iterator[str]:
    """Paths of the string fields whose bytes are not UTF-8. Stops where the bytes are not protobuf at all."""
    seen: dict[int, int] = {}
    for number, content in _length_delimited_fields(raw):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        index = seen[number] = seen.get(number, -1) + 1
        path = prefix + field.name + (f"[{index}]" if field.is_repeated else "")
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                content.decode()
            except UnicodeDecodeError:
                yield path
        elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            yield from _invalid_text(content, field.message_type, path + ".")


def _length_delimited_fields(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Field numbers and contents of strings, bytes and messages (protobuf encoding, wire type 2)."""
    position = 0
    while position < len(raw):
        key, position = _varint(raw, position)
        wire_type = key & 7
        if wire_type == _VARINT:
            _, position = _varint(raw, position)
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        elif wire_type == _BYTES:
            size, position = _varint(raw, position)
            if position + size > len(raw):
                return
            yield key >> 3, raw[position : position + size]
            position += size
        else:
            return


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    """A base-128 number and the position behind it; cut-off bytes read as the end."""
    value = shift = 0
    while position < len(raw):
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 or shift > 63:
            break
    return value, position
