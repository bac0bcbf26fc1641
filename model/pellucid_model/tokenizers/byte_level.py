"""Byte-level BPE as a tokenizer.json, out of a vocabulary, merges and the name of how words are cut.

In: what GGUF files, and vocab.json with merges.txt, hold. Out: the content of a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pellucid_model.tokenizers.base import TokenizerError
from pellucid_model.tokenizers.pretokenizers import PreTokenizer


def byte_level_tokenizer(
    vocabulary: Mapping[str, int], merges: Iterable[str], before: PreTokenizer, added_tokens: list[dict[str, Any]]
) -> dict[str, Any]:
    """The content of tokenizer.json. Raises TokenizerError.

    merges        two tokens each, with a space between them, the first ones first
    added_tokens  entries as files.added_token makes them
    """
    return {
        "version": "1.0",
        "added_tokens": added_tokens,
        "normalizer": {"type": "NFC"} if before.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(before.steps)},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": dict(vocabulary),
            "ignore_merges": before.ignore_merges,
            "merges": [_pair(merge) for merge in merges],
        },
    }


def _pair(merge: str) -> list[str]:
    left, space, right = merge[1:].partition(" ")
    if not space:
        raise TokenizerError(f"merge {merge!r} is not two tokens with a space between them")
    return [merge[0] + left, right]
