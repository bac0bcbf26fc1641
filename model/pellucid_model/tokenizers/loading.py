"""Finds the right tokenizer for a checkpoint, by the files it has.

In order: a GGUF file's metadata; in a folder tokenizer.json, which is a table of characters, a list of bytes or a file
of the tokenizers library; a SentencePiece model; vocab.json with merges.txt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pellucid_model.gguf.header import is_gguf
from pellucid_model.tokenizers import byte, character
from pellucid_model.tokenizers.base import Tokenizer, TokenizerError
from pellucid_model.tokenizers.files import TokenizerFiles
from pellucid_model.tokenizers.from_gguf import read_gguf_tokenizer
from pellucid_model.tokenizers.from_sentencepiece import NAMES as SENTENCEPIECE_NAMES
from pellucid_model.tokenizers.from_sentencepiece import read_sentencepiece
from pellucid_model.tokenizers.from_vocabulary import MERGES, VOCABULARY, read_vocabulary


def load_tokenizer(checkpoint: str | Path) -> Tokenizer | None:
    """The tokenizer of a folder or GGUF file; None where it has none, which then serves token ids only.

    Raises TokenizerError; its message is one line that names the file and the part of it that cannot be used.
    """
    try:
        return _found(Path(checkpoint))
    except OSError as error:
        raise TokenizerError(f"{error.filename} cannot be read: {error.strerror}") from None


def _found(path: Path) -> Tokenizer | None:
    if is_gguf(path):
        return _converted(path, read_gguf_tokenizer)
    if (path / "tokenizer.json").exists():
        return _read(path / "tokenizer.json")
    for name in SENTENCEPIECE_NAMES:
        if (path / name).exists():
            return _converted(path / name, read_sentencepiece)
    if (path / VOCABULARY).exists() and (path / MERGES).exists():
        return _converted(path, read_vocabulary)
    return None


def _read(path: Path) -> Tokenizer:
    """A tokenizer.json of any kind."""
    try:
        data = json.loads(path.read_bytes(), object_pairs_hook=_refuse_repeated_keys)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from None
    match data:
        case {"type": byte.TYPE}:
            return byte.ByteTokenizer.from_json(data, str(path))
        case {"type": str()}:
            return character.CharacterTokenizer.from_json(data, str(path))
        case {"model": dict()}:
            _need_library(path)
            from pellucid_model.tokenizers.huggingface import HuggingFaceTokenizer

            return HuggingFaceTokenizer.from_folder(path.parent)
        case _:
            kinds = f"neither a {character.TYPE} table, nor {byte.TYPE}, nor a file of the tokenizers library"
            raise TokenizerError(f"{path}: {kinds}")


def _converted(path: Path, read: Callable[[Path], TokenizerFiles | None]) -> Tokenizer | None:
    """A tokenizer in another form than tokenizer.json."""
    files = read(path)
    if files is None:
        return None
    _need_library(path)
    from pellucid_model.tokenizers.huggingface import HuggingFaceTokenizer

    try:
        return HuggingFaceTokenizer(files.to_json(), files.config)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _need_library(path: Path) -> None:
    """Tables of characters and bytes do without the library, so it is only imported where it is needed."""
    try:
        import tokenizers  # noqa: F401
    except ModuleNotFoundError:
        raise TokenizerError(f"{path}: this tokenizer needs the tokenizers package: pip install tokenizers") from None


def _refuse_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise TokenizerError(f"key {repeated!r} occurs twice")
    return result
