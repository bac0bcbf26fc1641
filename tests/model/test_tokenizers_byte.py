"""One token per byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_model.tokenizers import ByteTokenizer, InvalidTextError, Tokenizer, TokenizerError, load_tokenizer
from pellucid_testing.tokenizers import HARD_TEXTS

BYT5 = ByteTokenizer({"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}, first_byte=3)
AFTER = ByteTokenizer({"bos": "<bos>", "eos": "<eos>"})
BARE = ByteTokenizer()


@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    for tokenizer in (BYT5, AFTER, BARE):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(text.encode())


def test_ids() -> None:
    assert BARE.encode("aé") == [97, 195, 169]
    assert (BARE.vocab_size, BARE.bos_id, BARE.eos_ids, BARE.special_ids) == (256, None, (), frozenset())
    assert BYT5.encode("a") == [100]
    assert (BYT5.vocab_size, BYT5.pad_id, BYT5.eos_ids, BYT5.unk_id) == (259, 0, (1,), 2)
    assert AFTER.encode("a") == [256, 97]
    assert (AFTER.vocab_size, AFTER.bos_id, AFTER.eos_ids) == (258, 256, (257,))
    middle = ByteTokenizer({"pad": "<pad>", "eos": "<eos>"}, first_byte=1)
    assert (middle.pad_id, middle.encode("\0"), middle.eos_ids) == (0, [1], (257,))


def test_special_tokens() -> None:
    assert AFTER.encode("<eos>", add_special_tokens=False) == list(b"<eos>")
    assert AFTER.encode("a<eos>", parse_special_tokens=True) == [256, 97, 257]
    assert AFTER.encode("<bos>a", parse_special_tokens=True) == [256, 97]
    assert AFTER.encode_pieces([("<eos>", False), ("<eos>", True)]) == [*b"<eos>", 257]
    assert AFTER.decode([256, 97, 257]) == "a"
    assert AFTER.decode([97, 257], keep_special_tokens=True) == "a<eos>"


def test_bytes_that_are_no_text_and_ids_that_are_no_tokens() -> None:
    assert BARE.decode([0xE4, 0xBD, 97, 0xFF]) == "\ufffda\ufffd"
    assert BARE.decode([-1, 256, 10**9]) == ""
    with pytest.raises(InvalidTextError):
        BARE.encode("\ud800")


@pytest.mark.parametrize("tokenizer", [BYT5, AFTER, BARE], ids=["byt5", "after", "bare"])
def test_the_file(tmp_path: Path, tokenizer: ByteTokenizer) -> None:
    tokenizer.save(tmp_path)
    loaded: Tokenizer | None = load_tokenizer(tmp_path)
    assert isinstance(loaded, ByteTokenizer)
    assert loaded.sha256 == tokenizer.sha256
    assert [loaded.encode(text) for text in HARD_TEXTS] == [tokenizer.encode(text) for text in HARD_TEXTS]
    assert loaded.special_ids == tokenizer.special_ids


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "version is 2"),
        ({"first_byte": 3}, "first_byte is 3; accepted: 0 to 1"),
        ({"first_byte": True}, "first_byte is True"),
        ({"special_tokens": {"end": "<e>"}}, "unknown name 'end'"),
        ({"special_tokens": {"eos": "e"}}, "special_tokens.eos is 'e'"),
        ({"special_tokens": []}, "special_tokens must be an object"),
        ({"characters": []}, "unknown key 'characters'"),
    ],
)
def test_a_file_that_breaks_the_rules(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    content = {"type": "pellucid.bytes", "version": 1, "first_byte": 0, "special_tokens": {"eos": "<eos>"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes))
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
def test_a_folder_in_the_place_of_a_file_is_one_clear_line(name: str, tmp_path: Path) -> None:
    if name == "tokenizer_config.json":
        (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / name).mkdir()
    with pytest.raises(TokenizerError, match=rf"{name} cannot be read: Is a directory"):
        load_tokenizer(tmp_path)
