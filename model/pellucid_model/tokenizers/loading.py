"""Finds the right tokenizer for a checkpoint's folder."""

from __future__ import annotations

import json
from pathlib import Path

from pellucid_model.tokenizers import character
from pellucid_model.tokenizers.base import Tokenizer, TokenizerError


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None where the folder has no tokenizer.json, which then serves token ids only.

    Raises TokenizerError; its message is one line that names the file and the part of it that cannot be used.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_bytes(), object_pairs_hook=_refuse_repeated_keys)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from None
    match data:
        case {"type": str()}:
            return character.CharacterTokenizer.from_json(data, str(path))
        case {"model": dict()}:
            return _load_huggingface(path.parent)
        case _:
            raise TokenizerError(f"{path}: neither a {character.TYPE} table nor a file of the tokenizers library")


def _load_huggingface(folder: Path) -> Tokenizer:
    try:
        # Imported here because a character checkpoint does not need the library.
        from pellucid_model.tokenizers.huggingface import HuggingFaceTokenizer
    except ModuleNotFoundError:
        raise TokenizerError(f"{folder}: this tokenizer needs the tokenizers package: pip install tokenizers") from None
    return HuggingFaceTokenizer.from_folder(folder)


def _refuse_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise TokenizerError(f"key {repeated!r} occurs twice")
    return result
