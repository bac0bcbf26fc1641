"""The tokenizer in a GGUF file's metadata, as a tokenizer.json and a tokenizer_config.json.

In: the keys `tokenizer.ggml.*` and `tokenizer.chat_template`. Two kinds are read, by `tokenizer.ggml.model`: "gpt2" is
byte-level BPE, whose way of cutting words the file only names (`pretokenizers.py`); "llama" is SentencePiece's BPE
(`pieces.py`). Ids at the end that were padded to a round number are left out, so that they are never sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pellucid_model.errors import CheckpointError
from pellucid_model.gguf.header import read_header
from pellucid_model.tokenizers.base import TokenizerError
from pellucid_model.tokenizers.byte_level import byte_level_tokenizer
from pellucid_model.tokenizers.files import TokenizerFiles, added_token
from pellucid_model.tokenizers.pieces import Piece, PieceKind, Spelling, pieces_tokenizer
from pellucid_model.tokenizers.pretokenizers import UNNAMED, pre_tokenizer

_KEY = "tokenizer.ggml."
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NO_TOKEN = 0xFFFFFFFF
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
"""What the format means where a file of the kind "llama" does not say."""


def read_gguf_tokenizer(path: Path) -> TokenizerFiles | None:
    """The tokenizer of a file; None where it has none. Raises TokenizerError, naming file and key."""
    metadata = _metadata(path)
    if _KEY + "model" not in metadata or metadata[_KEY + "model"] in ("none", "no_vocab"):
        return None
    try:
        return gguf_tokenizer(metadata)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The tokenizer_config.json of a file. Raises TokenizerError, naming file and key."""
    try:
        return _config(_metadata(path))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """The tokenizer that a file's metadata describes. Raises TokenizerError, naming the key."""
    kind = metadata.get(_KEY + "model")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"{_KEY}model = {kind!r} is not supported; accepted: gpt2, llama")
    tokens = _texts(metadata, "tokens")
    kinds = _numbers(metadata, "token_type", len(tokens), PieceKind.NORMAL)
    used = len(tokens) - _padding(tokens, kinds)
    if kind == "gpt2":
        data = _byte_level(metadata, tokens[:used], kinds[:used])
    else:
        scores = _numbers(metadata, "scores", len(tokens), 0.0)
        pieces = [Piece(*entry) for entry in zip(tokens[:used], scores[:used], kinds[:used], strict=True)]
        spelling = Spelling(prefix=_flag(metadata, "add_space_prefix", True))
        unknown = _id(metadata, "unknown_token_id")
        if unknown is None:
            raise TokenizerError(f"{_KEY}unknown_token_id names no token")
        data = pieces_tokenizer(pieces, unknown, spelling, own="added")
    return TokenizerFiles(data, _config(metadata))


def gguf_end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text or a turn, ascending. Raises TokenizerError."""
    ids = (_id(metadata, key) for key in _END_KEYS)
    return tuple(sorted({token_id for token_id in ids if token_id is not None}))


def gguf_tokenizer_notice(metadata: Mapping[str, Any]) -> str | None:
    """What the operator should know of a tokenizer that is served all the same."""
    if metadata.get(_KEY + "model") != "gpt2" or metadata.get(_KEY + "pre", "") not in UNNAMED:
        return None
    return (
        f"the file does not name its pre-tokenizer ({_KEY}pre); texts are cut into words as GPT-2 does it, and if the "
        "model was trained with another way, its answers will be worse: convert the model to GGUF again"
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    special = (PieceKind.CONTROL, PieceKind.UNKNOWN)
    vocabulary: dict[str, int] = {}
    added: list[dict[str, Any]] = []
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if token in vocabulary:
            raise TokenizerError(f"{_KEY}tokens has {token!r} twice, as {vocabulary[token]} and as {index}")
        if not token:
            continue
        vocabulary[token] = index
        if kind in special or kind == PieceKind.USER_DEFINED:
            added.append(added_token(index, token, kind in special))
    before = pre_tokenizer(_name(metadata, "pre"))
    return byte_level_tokenizer(vocabulary, _texts(metadata, "merges"), before, added)


def _config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    tokens = metadata.get(_KEY + "tokens", [])
    for role, key in _ROLES.items():
        token_id = _id(metadata, key)
        if token_id is not None:
            config[role] = tokens[token_id]
    byte_level = metadata.get(_KEY + "model") == "gpt2"
    adds_bos = pre_tokenizer(_name(metadata, "pre")).adds_bos if byte_level else True
    for end, usual in (("bos", adds_bos), ("eos", False)):
        config[f"add_{end}_token"] = _flag(metadata, f"add_{end}_token", usual and f"{end}_token" in config)
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _padding(tokens: Sequence[str], kinds: Sequence[int]) -> int:
    """How many entries at the end stand for nothing: marked as unused, or named as converters name them."""
    count = 0
    for index in range(len(tokens) - 1, -1, -1):
        if kinds[index] != PieceKind.UNUSED and tokens[index] != f"[PAD{index}]":
            break
        count += 1
    return count


def _metadata(path: Path) -> dict[str, Any]:
    try:
        return read_header(path).metadata
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None


def _id(metadata: Mapping[str, Any], key: str) -> int | None:
    """A token id that a key names; None where it names none."""
    usual = _LLAMA_IDS.get(key) if metadata.get(_KEY + "model") == "llama" else None
    token_id, count = metadata.get(_KEY + key, usual), len(metadata.get(_KEY + "tokens", ()))
    if token_id is None or token_id == _NO_TOKEN:
        return None
    if type(token_id) is not int or not 0 <= token_id < count:
        raise TokenizerError(f"{_KEY}{key} = {token_id!r}; accepted: an id below {count}, the number of tokens")
    return token_id


def _name(metadata: Mapping[str, Any], key: str) -> str:
    name = metadata.get(_KEY + key, "")
    if not isinstance(name, str):
        raise TokenizerError(f"{_KEY}{key} = {name!r}; it must be a text")
    return name


def _flag(metadata: Mapping[str, Any], key: str, usual: bool) -> bool:
    value = metadata.get(_KEY + key, usual)
    if not isinstance(value, bool):
        raise TokenizerError(f"{_KEY}{key} = {value!r}; it must be true or false")
    return value


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(_KEY + key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TokenizerError(f"{_KEY}{key} is missing, or not a list of texts")
    return values


def _numbers(metadata: Mapping[str, Any], key: str, count: int, usual: float) -> Sequence[Any]:
    values = metadata.get(_KEY + key, [usual] * count)
    if not isinstance(values, list) or len(values) != count or not all(type(value) in (int, float) for value in values):
        raise TokenizerError(f"{_KEY}{key} must be {count} numbers, one for each token")
    return values
