"""The character tokenizer: its table, its file, its rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid_model.tokenizers import (
    CharacterTokenizer,
    InvalidTextError,
    TokenizerError,
    UnknownCharacterError,
    load_tokenizer,
)

TOKENIZER = CharacterTokenizer.train(["今天天气不错。", "abc 🙂\n"])
FILE: dict[str, Any] = json.loads(TOKENIZER.to_json())


def test_training_numbers_special_tokens_first_and_characters_in_code_point_order() -> None:
    tokenizer = CharacterTokenizer.train(["ba", "c\n"])
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id) == (0, 1, (2,), 3)
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)] == [
        *(b"<pad>", b"<bos>", b"<eos>", b"<unk>"),
        *(b"\n", b"a", b"b", b"c"),
    ]


def test_a_saved_table_loads_as_the_same_tokenizer(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, CharacterTokenizer)
    assert loaded.sha256 == TOKENIZER.sha256
    assert loaded.to_json() == (tmp_path / "tokenizer.json").read_bytes()
    assert loaded.encode("今天🙂") == TOKENIZER.encode("今天🙂")


@given(text=st.text(alphabet="今天气不错。abc 🙂\n", max_size=30))
def test_known_text_comes_back_as_it_was(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids[0] == TOKENIZER.bos_id
    assert len(ids) == len(text) + 1
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids, keep_special_tokens=True) == "<bos>" + text


@given(text=st.text(max_size=30))
def test_unknown_characters_become_unk(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert [i == TOKENIZER.unk_id for i in ids] == [c not in "今天气不错。abc 🙂\n" for c in text]


def test_a_table_without_unk_names_the_unknown_character() -> None:
    tokenizer = CharacterTokenizer(["a", "b"], {"bos": "<s>"})
    with pytest.raises(UnknownCharacterError, match=r"'你' \(U\+4F60\) at character 2") as caught:
        tokenizer.encode("ab你")
    assert (caught.value.character, caught.value.offset) == ("你", 2)
    with pytest.raises(UnknownCharacterError) as caught:
        tokenizer.encode("a<s>bx", parse_special_tokens=True)
    assert (caught.value.character, caught.value.offset) == ("x", 5)


def test_a_table_may_lack_special_tokens() -> None:
    tokenizer = CharacterTokenizer(["a"], {"eos": "<end>"})
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id) == (None, (0,), None)
    assert tokenizer.encode("a") == [1]
    assert CharacterTokenizer(["a"], {}).encode("a", parse_special_tokens=True) == [0]


def test_special_tokens_in_a_text_are_plain_text_unless_parsed() -> None:
    tokenizer = CharacterTokenizer.train(["<eos>ab"])
    plain = tokenizer.encode("a<eos>b", add_special_tokens=False)
    assert len(plain) == 7
    assert not tokenizer.special_ids.intersection(plain)
    parsed = tokenizer.encode("a<eos>b", add_special_tokens=False, parse_special_tokens=True)
    assert [tokenizer.token_bytes(i) for i in parsed] == [b"a", b"<eos>", b"b"]


def test_bos_is_added_once() -> None:
    tokenizer = CharacterTokenizer.train(["hi<bos>"])
    assert tokenizer.encode("<bos>hi", parse_special_tokens=True) == tokenizer.encode("hi")
    assert tokenizer.encode("hi", add_special_tokens=False) == tokenizer.encode("hi")[1:]
    assert tokenizer.encode("<bos><bos>", parse_special_tokens=True) == [1, 1]
    assert tokenizer.encode("") == [1]


def test_a_spelling_that_begins_another_does_not_hide_it() -> None:
    tokenizer = CharacterTokenizer(["x"], {"bos": "<b", "eos": "<b>"})
    assert tokenizer.encode("x<b>", add_special_tokens=False, parse_special_tokens=True) == [2, 1]


@pytest.mark.parametrize("token_id", [-1, TOKENIZER.vocab_size, 10**9])
def test_ids_outside_the_table_decode_to_nothing(token_id: int) -> None:
    assert TOKENIZER.token_bytes(token_id) == b""
    assert TOKENIZER.decode([token_id]) == ""


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidTextError, match=r"U\+D800 at character 1"):
        TOKENIZER.encode("a\ud800")
    with pytest.raises(InvalidTextError):
        CharacterTokenizer.train(["\udfff"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown key 'extra'"),
        ({"type": "pellucid.word"}, "type is 'pellucid.word'"),
        ({"version": 2}, "version is 2"),
        ({"version": True}, "version is True"),
        ({"characters": "ab"}, "characters must be a list"),
        ({"characters": ["a", "b", "a"]}, r"characters\[2\] repeats 'a' of characters\[0\]"),
        ({"characters": ["a", "bc"]}, r"characters\[1\] is 'bc'"),
        ({"characters": [""]}, r"characters\[0\] is ''"),
        ({"characters": [7]}, r"characters\[0\] is 7"),
        ({"characters": ["\ud800"]}, r"characters\[0\] is '\\ud800'"),
        ({"special_tokens": []}, "special_tokens must be an object"),
        ({"special_tokens": {"cls": "<cls>"}}, "unknown name 'cls'"),
        ({"special_tokens": {"bos": "b"}}, "special_tokens.bos is 'b'"),
        ({"special_tokens": {"bos": None}}, "special_tokens.bos is None"),
        ({"special_tokens": {"bos": "<s>", "eos": "<s>"}}, "'<s>' stands for two tokens"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**FILE, **change}))
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["version", "special_tokens", "characters"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({k: v for k, v in FILE.items() if k != key}))
    with pytest.raises(TokenizerError, match=f"key '{key}' is missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "neither"),
        ("{}", "neither"),
        ('{"type": "pellucid.character", "type": "x"}', "key 'type' occurs twice"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
