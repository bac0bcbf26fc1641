"""A SentencePiece model file as a tokenizer.json and a tokenizer_config.json.

In: `tokenizer.model` or its like, a protocol buffer (sentencepiece_model.proto of github.com/google/sentencepiece), and
the tokenizer_config.json beside it. Out: the two files. The kinds BPE and Unigram are read. Of the buffer's wire format
(https://protobuf.dev/programming-guides/encoding) so little is needed that it is read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pellucid_model.tokenizers.base import TokenizerError
from pellucid_model.tokenizers.files import TokenizerFiles, added_token, read_tokenizer_config
from pellucid_model.tokenizers.pieces import Piece, PieceKind, Spelling, pieces_tokenizer

NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""What the file is called."""
_UNIGRAM, _BPE = 1, 2
_KINDS = {_UNIGRAM: "unigram", _BPE: "bpe", 3: "word", 4: "char"}

# Numbers of the fields that are read. A model is its pieces, how it was trained, and how it rewrites a text.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX, _UNKNOWN_ID = 3, 24, 40
_CHARSMAP, _ADD_PREFIX, _COLLAPSE, _ESCAPE = 2, 3, 4, 5
_ROLES = {"bos_token": (41, 1), "eos_token": (42, 2), "unk_token": (_UNKNOWN_ID, 0), "pad_token": (43, -1)}
"""Role -> (field of the trainer, its default)."""


def read_sentencepiece(path: Path) -> TokenizerFiles:
    """Read a model file and the configuration beside it. Raises TokenizerError, naming the file."""
    try:
        return _converted(path.read_bytes(), read_tokenizer_config(path.parent))
    except _WireError:
        raise TokenizerError(f"{path}: not a SentencePiece model") from None
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _converted(data: bytes, given: dict[str, Any]) -> TokenizerFiles:
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == _PIECE:
            pieces.append(_piece(value))
        elif number == _TRAINER:
            trainer = dict(_fields(value))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(value))
    if not pieces:
        raise _WireError
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise TokenizerError(f"its model_type is {_KINDS.get(kind, kind)}; accepted: unigram, bpe")
    if trainer.get(_SPACE_AS_SUFFIX, 0) or not normalizer.get(_ESCAPE, 1):
        raise TokenizerError("spaces are kept in a way that is not supported; accepted: ▁ before a word")
    ids = {role: _signed(trainer.get(number, default)) for role, (number, default) in _ROLES.items()}
    unknown = ids["unk_token"]
    if not 0 <= unknown < len(pieces):
        raise TokenizerError(f"its unk_id is {unknown}; accepted: below {len(pieces)}, the number of pieces")
    spelling = Spelling(
        prefix=bool(normalizer.get(_ADD_PREFIX, 1)),
        collapse=bool(normalizer.get(_COLLAPSE, 1)),
        charsmap=normalizer.get(_CHARSMAP, b""),
    )
    tokenizer = pieces_tokenizer(pieces, unknown, spelling, unigram=kind == _UNIGRAM)
    tokenizer["added_tokens"] += _further_tokens(given, len(pieces))
    named = {role: pieces[token_id].text for role, token_id in ids.items() if 0 <= token_id < len(pieces)}
    config = named | {key: value for key, value in given.items() if value is not None}
    # Where the configuration does not say, the families that have such a file put BOS before a text.
    config.setdefault("add_bos_token", config.get("bos_token") is not None)
    return TokenizerFiles(tokenizer, config)


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    try:
        text, score = fields.get(_TEXT, b"").decode(), struct.unpack("<f", fields.get(_SCORE, bytes(4)))[0]
    except (UnicodeDecodeError, AttributeError, TypeError, struct.error):
        raise _WireError from None
    return Piece(text, score, fields.get(_KIND, PieceKind.NORMAL))


def _further_tokens(config: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Tokens that tokenizer_config.json adds after the pieces."""
    entries = config.get("added_tokens_decoder", {})
    further = {int(key): entry for key, entry in entries.items() if key.isdecimal() and int(key) >= count}
    return [added_token(i, further[i]["content"], bool(further[i].get("special"))) for i in sorted(further)]


class _WireError(Exception):
    """The bytes are not what they should be."""


def _fields(data: object) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message's fields: a number, or the bytes of anything else."""
    if not isinstance(data, bytes):
        raise _WireError
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        match key & 7:
            case 0:
                value, position = _varint(data, position)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, position = _varint(data, position)
            case 5:
                size = 4
            case _:
                raise _WireError
        if position + size > len(data):
            raise _WireError
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise _WireError
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _WireError


def _signed(value: int) -> int:
    """An int32 as the wire has it: below zero in 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
