"""The chat template that comes with a checkpoint: its source, and the tokens it may speak of.

In: a checkpoint's folder or GGUF file. Out: the template's text, not rendered; whoever renders it needs a sandbox.

It is looked for where the transformers library does: in `chat_template.jinja`, then under `chat_template` in
`tokenizer_config.json`, which holds a text or a list of named ones, of which "default" is taken. In a GGUF file it is
the key `tokenizer.chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid_model.tokenizers.base import TokenizerError
from pellucid_model.tokenizers.files import CONFIG, ROLES, named_token, read_tokenizer_config

FILE = "chat_template.jinja"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and what it is rendered with beside the messages."""

    source: str
    bos_token: str = ""
    """Spelling of the begin-of-sequence token; "" where the checkpoint names none."""
    eos_token: str = ""
    """Spelling of the end-of-sequence token; "" where the checkpoint names none."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Every token that has a role, by its variable in a template: bos_token, eos_token, pad_token, … These are not
    all control tokens; all of them are Tokenizer.special_ids."""


def load_chat_template(checkpoint: str | Path) -> ChatTemplate | None:
    """The template of a folder or a GGUF file; None where it has none. Raises TokenizerError, one line."""
    path = Path(checkpoint)
    config = read_tokenizer_config(path)
    source = _read_file(path / FILE)
    if source is None:
        source = _default(config.get("chat_template"))
    if source is None:
        return None
    tokens = {role: token for role in ROLES if (token := named_token(config, role)) is not None}
    return ChatTemplate(source, tokens.get("bos_token", ""), tokens.get("eos_token", ""), tokens)


def _read_file(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None


def _default(given: Any) -> str | None:
    """The template of a configuration, the one named "default" where there are several."""
    match given:
        case None | str():
            return given
        case [*entries]:
            for entry in entries:
                match entry:
                    case {"name": "default", "template": str(source)}:
                        return source
            raise TokenizerError(f'{CONFIG}: none of its chat_template entries is {{"name": "default", "template": …}}')
        case _:
            raise TokenizerError(f"{CONFIG}: chat_template is {type(given).__name__}; it must be a string or a list")
