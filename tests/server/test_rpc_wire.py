"""Bytes that are no valid request: what is wrong is named, and nothing unknown passes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.v1 import inference_pb2, tokenizer_pb2, types_pb2
from pellucid_server.errors import InvalidRequest, UnsupportedField
from pellucid_server.rpc.wire import parse

BAD_TEXTS = [b"\xed\xa0\x80", b"\xc0\x80", b"\xff", b"ok\xe4\xbd"]


def text_field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def refused(raw: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(raw, inference_pb2.GenerateRequest)
    return caught.value


@pytest.mark.parametrize("bad", BAD_TEXTS)
def test_text_that_is_not_utf8_is_named(bad: bytes) -> None:
    assert refused(text_field(3, bad)).violations[0].field == "text"
    assert refused(text_field(1, b"fine") + text_field(2, bad)).violations[0].field == "model"
    stopping = text_field(3, b"fine") + text_field(3, bad)
    error = refused(text_field(3, b"x") + text_field(8, stopping))
    assert [(v.field, v.description) for v in error.violations] == [("stopping.stop_strings[1]", "is not valid UTF-8")]


def test_repeated_texts_are_named_by_index() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(text_field(2, b"a") + text_field(2, b"\xff"), tokenizer_pb2.TokenizeRequest)
    assert caught.value.violations[0].field == "texts[1]"


@pytest.mark.parametrize("raw", [b"\xff", b"\x1a\x05ab", b"\x0f", b"\x1a" + b"\xff" * 9, b"\x00"])
def test_bytes_that_are_not_protobuf(raw: bytes) -> None:
    error = refused(raw)
    assert error.violations[0].field == "pellucid.v1.GenerateRequest"
    assert error.reason == "INVALID_FIELD"


def test_unknown_fields_are_refused_with_path_and_number() -> None:
    sampling = types_pb2.SamplingParams(temperature=1).SerializeToString() + b"\x30\x01"
    raw = text_field(3, b"x") + text_field(7, sampling) + text_field(13, b"adapter") + b"\x88\x01\x05"
    with pytest.raises(UnsupportedField) as caught:
        parse(raw, inference_pb2.GenerateRequest)
    assert [v.field for v in caught.value.violations] == ["field 13", "field 17", "sampling.field 6"]


def test_unknown_fields_in_repeated_messages() -> None:
    raw = text_field(2, b"") + text_field(2, b"\x50\x01")
    with pytest.raises(UnsupportedField) as caught:
        parse(raw, tokenizer_pb2.DetokenizeRequest)
    assert [v.field for v in caught.value.violations] == ["sequences[1].field 10"]


def test_a_thousand_unknown_fields_make_a_short_answer() -> None:
    raw = b"".join(_varint(number << 3) + b"\x01" for number in range(100, 1100))
    with pytest.raises(UnsupportedField) as caught:
        parse(raw, inference_pb2.GenerateRequest)
    assert len(caught.value.violations) == 16


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_invalid(raw: bytes) -> None:
    message = None
    with contextlib.suppress(InvalidRequest):
        message = parse(raw, inference_pb2.GenerateRequest)
    if message is None:
        assert refused(raw).violations


@given(st.text(max_size=20), st.lists(st.text(max_size=8), max_size=3), st.booleans())
def test_valid_requests_pass_unchanged(text: str, stops: list[str], flag: bool) -> None:
    request = inference_pb2.GenerateRequest(text=text, omit_special_tokens=flag)
    request.stopping.stop_strings.extend(stops)
    assert parse(request.SerializeToString(), inference_pb2.GenerateRequest) == request
