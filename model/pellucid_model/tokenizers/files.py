"""The two files in which the Hugging Face world keeps a tokenizer, read or made from another form.

`tokenizer.json` is the algorithm and the vocabulary; `tokenizer_config.json` says which tokens have a role, what is
added to a text, and the chat template. Every other form (GGUF, SentencePiece, vocab.json with merges.txt) is turned
into these two, so that there is one way from a text to ids, and a conversion can write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid_model.gguf.header import is_gguf
from pellucid_model.tokenizers.base import TokenizerError

CONFIG = "tokenizer_config.json"
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Keys of the configuration whose value is a token."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What the two files hold."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]

    def to_json(self) -> bytes:
        """The bytes of tokenizer.json; the same tokenizer always gives the same bytes."""
        return json.dumps(self.tokenizer, ensure_ascii=False).encode()


def read_tokenizer_config(checkpoint: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder, completed by the older special_tokens_map.json; the same of a GGUF file.

    Empty where there is none. Raises TokenizerError, naming the file.
    """
    if is_gguf(checkpoint):
        from pellucid_model.tokenizers.from_gguf import read_gguf_config

        return read_gguf_config(checkpoint)
    older = read_object(checkpoint / "special_tokens_map.json")
    return {role: older[role] for role in ROLES if role in older} | read_object(checkpoint / CONFIG)


def named_token(config: Mapping[str, Any], role: str) -> str | None:
    """The token that has a role, which is written as a text or as an object with "content"; None: nobody has it."""
    match config.get(role):
        case None:
            return None
        case str(content) | {"content": str(content)}:
            return content
        case other:
            raise TokenizerError(f"{CONFIG}: {role} is {other!r}; it must be a string")


def added_token(token_id: int, content: str, special: bool) -> dict[str, Any]:
    """An entry of tokenizer.json's "added_tokens": it is found in a text before anything else is done to it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises TokenizerError, naming it."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: must hold a JSON object")
    return content
