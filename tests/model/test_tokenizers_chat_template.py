"""Where a chat template is found, and the tokens that come with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pellucid_model.tokenizers import TokenizerError, load_chat_template

NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


def configure(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_no_template(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    assert load_chat_template(configure(tmp_path, eos_token="</s>", chat_template=None)) is None


def test_in_the_configuration(tmp_path: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "additional": ["<x>"]}
    template = load_chat_template(configure(tmp_path, chat_template="{{ bos_token }}", **tokens))
    assert template is not None
    assert (template.source, template.bos_token, template.eos_token) == ("{{ bos_token }}", "<s>", "</s>")
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_one_of_several(tmp_path: Path) -> None:
    template = load_chat_template(configure(tmp_path, chat_template=NAMED))
    assert template is not None
    assert (template.source, template.bos_token) == ("plain", "")


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("你好 {{ eos_token }}", encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<old>", "bos_token": "<b>"}))
    template = load_chat_template(configure(tmp_path, chat_template="other", eos_token="<new>"))
    assert template is not None
    assert (template.source, template.bos_token, template.eos_token) == ("你好 {{ eos_token }}", "<b>", "<new>")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"chat_template": 7}, "chat_template is int; it must be a string or a list"),
        (
            {"chat_template": [{"name": "rag", "template": "x"}]},
            'none of its chat_template entries is {"name": "default"',
        ),
        ({"chat_template": "x", "bos_token": 1}, "bos_token is 1; it must be a string"),
    ],
)
def test_what_cannot_be_used(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        load_chat_template(configure(tmp_path, **config))
    assert says in str(caught.value)


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"abc\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: not UTF-8: .* at byte 3"):
        load_chat_template(tmp_path)
