"""Each cleaning step alone, then all of them and their counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid_model.training.corpus.cleaning import (
    clean,
    collapse_whitespace,
    has_odd_character,
    normalize,
    read_lines,
    remove_invisible,
)
from pellucid_model.training.errors import TrainingError


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("ＡＢＣ１２３ｘｙｚ", "ABC123xyz"),
        ("今天，好吗？答：好！", "今天，好吗？答：好！"),  # Chinese punctuation stays
        ("e\u0301", "é"),  # NFC
        ("①㎏", "①㎏"),  # not NFKC
    ],
)
def test_normalize(raw: str, cleaned: str) -> None:
    assert normalize(raw) == cleaned


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("\ufeff今天", "今天"),
        ("今\u200b天", "今天"),
        ("今\x00天\x7f", "今天"),
        ("今\t天\r", "今 天 "),
        ("今\u3000天", "今\u3000天"),  # a space, which another step sees to
        ("", ""),
    ],
)
def test_remove_invisible(raw: str, cleaned: str) -> None:
    assert remove_invisible(raw) == cleaned


@pytest.mark.parametrize(
    ("raw", "cleaned"), [("  今天 \u3000\u00a0 很好\n", "今天 很好"), ("今天", "今天"), (" \t ", ""), ("", "")]
)
def test_collapse_whitespace(raw: str, cleaned: str) -> None:
    assert collapse_whitespace(raw) == cleaned


@pytest.mark.parametrize("line", ["好\ufffd", "好😀", "好\ue000", "好\U000e0fff", chr(0xD800), "☃"])
def test_odd_characters(line: str) -> None:
    assert has_odd_character(line)


@pytest.mark.parametrize("line", ["今天，好！", "Hello, world", "Привет", "《老街》：一百元", "3 + 4 = 7"])
def test_ordinary_characters(line: str) -> None:
    assert not has_odd_character(line)


def test_clean_keeps_the_first_of_equal_lines_in_order_and_counts_the_rest() -> None:
    raw = ["二二二二", "一一一一", " 二二二二 ", "短", "", "长" * 9, "好好好😀", "ＡＢＣＤ", "ABCD", "\ufeff\u200b"]
    corpus = clean(raw, min_length=4, max_length=8)
    assert corpus.lines == ("二二二二", "一一一一", "ABCD")
    assert (corpus.read, corpus.too_short, corpus.too_long, corpus.odd, corpus.duplicate) == (10, 3, 1, 1, 2)
    assert corpus.summary() == ("3 of 10 lines kept (3 too short, 1 too long, 1 with odd characters, 2 duplicates)")


@pytest.mark.parametrize(("length", "kept"), [(3, False), (4, True), (8, True), (9, False)])
def test_length_limits_are_inclusive(length: int, kept: bool) -> None:
    assert bool(clean(["好" * length], min_length=4, max_length=8).lines) is kept


def test_a_cleaned_line_is_clean() -> None:
    once = clean(["  Ａ\u200b今天\t \u3000好  ", "e\u0301e\u0301e\u0301e\u0301"], min_length=1, max_length=50)
    assert clean(once.lines, min_length=1, max_length=50).lines == once.lines


def test_read_lines_takes_unix_and_windows_files(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes("\ufeff今天很好\r\n明天也好\n".encode())
    assert clean(read_lines(path), min_length=1, max_length=50).lines == ("今天很好", "明天也好")


def test_read_lines_names_file_line_and_byte_of_what_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "gbk.txt"
    path.write_bytes("好\n".encode() + "今天".encode("gbk"))
    with pytest.raises(TrainingError, match=r"gbk\.txt is not UTF-8: line 2 holds the byte 0xbd"):
        read_lines(path)


def test_read_lines_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"none\.txt cannot be read: No such file"):
        read_lines(tmp_path / "none.txt")
