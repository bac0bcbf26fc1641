"""SentencePiece vocabularies as a tokenizer.json: pieces with scores, "▁" for a space, bytes for what has no piece.

In: the pieces of a GGUF file or of a SentencePiece `.model`. Out: the content of a tokenizer.json.

The BPE kind keeps no list of merges: two neighbours merge where their union is a piece, the best score first (Kudo and
Richardson 2018, arXiv:1808.06226). So the merges are all ways to cut a piece in two pieces, ordered by its score.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from pellucid_model.tokenizers.base import TokenizerError
from pellucid_model.tokenizers.files import added_token

SPACE = "▁"
MAX_PIECE = 256
"""Characters that a piece may have; the longest that are known have 48."""
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


class PieceKind(IntEnum):
    """What a vocabulary entry is; SentencePiece and GGUF number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL = frozenset({PieceKind.CONTROL, PieceKind.UNKNOWN})


@dataclass(frozen=True)
class Piece:
    """One entry. Its id is its place in the list."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Spelling:
    """How a text is rewritten before it is cut.

    prefix    a space is put before it, and before what follows a special token
    collapse  spaces at its ends are dropped, several in a row become one
    charsmap  SentencePiece's table of replacements, in its own form; empty for none
    """

    prefix: bool = True
    collapse: bool = False
    charsmap: bytes = b""


def pieces_tokenizer(
    pieces: Sequence[Piece],
    unknown: int,
    spelling: Spelling,
    *,
    unigram: bool = False,
    own: Literal["added", "cut"] = "cut",
) -> dict[str, Any]:
    """The content of tokenizer.json. Raises TokenizerError.

    unknown  id of the piece that stands for text without pieces
    own      the user's own pieces are found in the text as it was written ("added"), as llama.cpp does it, or are cut
             out of the rewritten text ("cut"), as SentencePiece's BPE does it; Unigram finds them by their score
    """
    ids = {piece.text: index for index, piece in enumerate(pieces)}
    byte_fallback = all(token in ids for token in _BYTES)
    defined = [piece.text for piece in pieces if piece.kind == PieceKind.USER_DEFINED and piece.text]
    found = bool(defined) and own == "cut"
    cut = found and not unigram
    model: dict[str, Any]
    if unigram:
        vocabulary = [[piece.text, piece.score] for piece in pieces]
        model = {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": byte_fallback}
    else:
        model = {
            "type": "BPE",
            "vocab": ids,
            "merges": _merges(pieces),
            "unk_token": pieces[unknown].text,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": cut,  # no merges lead to the pieces that are cut out
        }
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(pieces, {*_SPECIAL, *([] if found else [PieceKind.USER_DEFINED])}),
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(spelling)},
        "pre_tokenizer": _isolated(defined if cut else []) if cut or unigram else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(spelling.prefix)},
        "model": model,
    }


def _isolated(texts: list[str]) -> dict[str, Any]:
    """Cuts these out of a text. Also cuts a text that spells a byte piece, which else would be taken as that byte."""
    longest_first = sorted(texts, key=len, reverse=True)
    pattern = {"Regex": "|".join([*map(re.escape, longest_first), "<(?=0x[0-9A-F]{2}>)"])}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _merges(pieces: Sequence[Piece]) -> list[list[str]]:
    scores = {piece.text: piece.score for piece in pieces if piece.kind == PieceKind.NORMAL}
    found: list[tuple[float, str, str]] = []
    for text, score in scores.items():
        if len(text) > MAX_PIECE:
            raise TokenizerError(f"a piece has {len(text)} characters; {MAX_PIECE} are the limit")
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in scores and right in scores:
                found.append((score, left, right))
    found.sort(key=lambda merge: merge[0], reverse=True)
    return [[left, right] for _, left, right in found]


def _added_tokens(pieces: Sequence[Piece], kinds: Set[int]) -> list[dict[str, Any]]:
    return [
        added_token(index, piece.text, piece.kind in _SPECIAL)
        for index, piece in enumerate(pieces)
        if piece.text and piece.kind in kinds
    ]


def _normalizers(spelling: Spelling) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if spelling.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(spelling.charsmap).decode()})
    if spelling.collapse:
        steps.append(_replace({"Regex": "^ +| +$"}, ""))
        steps.append(_replace({"Regex": " {2,}"}, " "))
    if spelling.prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    return [*steps, _replace({"String": " "}, SPACE)]


def _decoders(strip: bool) -> list[dict[str, Any]]:
    steps = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    return [*steps, {"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strip else steps


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}
