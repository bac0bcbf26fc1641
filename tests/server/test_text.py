"""From token ids to text: whole characters, stop strings, one incremental path."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pellucid_server.text
from pellucid_model.tokenizers import CharacterTokenizer, Tokenizer, load_tokenizer
from pellucid_server.text import Delta, TextStream
from pellucid_server.text.detokenizer import IncrementalDetokenizer
from pellucid_server.text.stop import StopMatcher
from pellucid_testing.tokenizers import byte_level_bpe, sentence_piece_bpe, sentence_piece_unigram, write

FOLDER = pellucid_server.text.__path__[0]


class ScriptTokenizer:
    """Tokens whose bytes a test chooses; negative ids are special."""

    def __init__(self, tokens: Sequence[bytes], special: Mapping[int, bytes] = {}) -> None:
        self._table = {**dict(enumerate(tokens)), **special}
        self.special_ids = frozenset(special)

    def token_bytes(self, token_id: int) -> bytes:
        return self._table.get(token_id, b"")

    def decode(self, ids: Iterable[int], *, keep_special_tokens: bool = False) -> str:
        kept = (i for i in ids if keep_special_tokens or i not in self.special_ids)
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


def script(
    tokens: Sequence[str | bytes], stop: Sequence[str] = (), include_stop: bool = False, min_new_tokens: int = 0
) -> tuple[list[str], str | None]:
    """Run an output of these tokens; returns every step's text, the final one included, and the matched stop."""
    pieces = [token if isinstance(token, bytes) else token.encode() for token in tokens]
    stream = TextStream(ScriptTokenizer(pieces), stop, include_stop, min_new_tokens=min_new_tokens)
    texts: list[str] = []
    for token_id in range(len(pieces)):
        delta = stream.push([token_id])
        texts.append(delta.text)
        if delta.matched_stop is not None:
            return [*texts, stream.finish()], delta.matched_stop
    return [*texts, stream.finish()], None


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = list(itertools.accumulate(sizes))
    assert ends[-1] == len(data)
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


# ---- Whole characters ----


@pytest.mark.parametrize(
    ("character", "sizes"),
    [
        *(("聪", sizes) for sizes in ([1, 2], [2, 1], [1, 1, 1], [3])),
        *(("🔥", sizes) for sizes in ([1, 1, 1, 1], [2, 2], [1, 3], [3, 1], [4])),
        *(("é", sizes) for sizes in ([1, 1], [2])),
    ],
)
def test_a_character_comes_out_whole_with_its_last_token(character: str, sizes: list[int]) -> None:
    """B01: characters and emoji arrive as replacement marks, because each token is decoded by itself."""
    texts, _ = script(["a", *cut(character.encode(), sizes), "b"])
    assert texts == ["a", *[""] * (len(sizes) - 1), character, "b", ""]


def test_a_token_may_hold_text_and_the_beginning_of_a_character() -> None:
    """B01: a split character is looked for only where it begins with a token of one byte."""
    first, rest = "好".encode()[:1], "好".encode()[1:]
    assert script([b"a " + first, rest + b"b" + first, rest])[0] == ["a ", "好b", "好", ""]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_unfinished_character_is_one_replacement_character_at_the_end(count: int) -> None:
    """B04: generation ends in the middle of a character; its bytes are dropped on one path and an error on another.

    Every end is a finish(): that of a limit, and that of EOS, which is not pushed.
    """
    assert script(["a", *cut("🔥".encode(), [1, 1, 1, 1])[:count]])[0] == ["a", *[""] * count, "\ufffd"]
    assert script(["a", *cut("🔥".encode(), [1, 1, 1, 1])[:count]], ["\ufffd", "zz"])[0][-1] == "\ufffd"


def test_hopeless_bytes_do_not_wait() -> None:
    assert script([b"\xff", b"\xe4", b"a", b"\xf0\x9f", b"\xf0\x9f", "🔥".encode()])[0] == [
        *("\ufffd", "", "\ufffda", "", "\ufffd", "\ufffd🔥"),
        "",
    ]


# One byte of each class that UTF-8's rules distinguish (Unicode 15, table 3-7).
_CLASSES = [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xE0, 0xE4, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF]


def test_every_short_run_of_bytes_streams_as_it_decodes_and_holds_only_what_may_still_become_a_character() -> None:
    tokenizer = ScriptTokenizer([bytes([byte]) for byte in range(256)])
    for run in itertools.product(_CLASSES, repeat=4):
        detokenizer = IncrementalDetokenizer(tokenizer)
        text = ""
        for count, byte in enumerate(run, start=1):
            text += detokenizer.push([byte])
            held = _unfinished(bytes(run[:count]))
            assert text == bytes(run[: count - held]).decode("utf-8", "replace"), run
        assert text + detokenizer.flush() == bytes(run).decode("utf-8", "replace"), run


def _unfinished(data: bytes) -> int:
    """How many bytes at the end are a proper beginning of some character."""
    return next((size for size in (3, 2, 1) if size <= len(data) and data[-size:] in _BEGINNINGS), 0)


_BEGINNINGS = {
    bytes(chr(point).encode()[:size])
    for point in (*range(0x80, 0xD800, 16), *range(0xE000, 0x110000, 16))
    for size in range(1, len(chr(point).encode()))
}


def test_special_tokens_are_left_out_or_spelled() -> None:
    tokenizer = ScriptTokenizer([b"a", "好".encode()[:2], "好".encode()[2:]], {-1: b"<eos>"})
    for keep, expected in ((False, "a好"), (True, "a<eos>\ufffd<eos>\ufffd")):
        stream = TextStream(tokenizer, keep_special_tokens=keep)
        text = "".join(stream.push([i]).text for i in (0, -1, 1, -1, 2)) + stream.finish()
        assert text == expected == tokenizer.decode([0, -1, 1, -1, 2], keep_special_tokens=keep)


def test_unknown_ids_add_nothing() -> None:
    stream = TextStream(ScriptTokenizer([b"a"]))
    assert [stream.push([i]) for i in (0, 999, 0)] == [Delta("a"), Delta(""), Delta("a")]


# ---- Stop strings ----


def test_held_text_comes_out_at_every_kind_of_end() -> None:
    """B07: the held end of the text is never sent when generation ends otherwise than by a stop string."""
    assert script(["ok", "??"], ["???"]) == (["ok", "", "??"], None)
    assert script(["Mars", "?\n"], ["\n"]) == (["Mars", "?", ""], "\n")


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "matched"),
    [
        (["The ", "Paris", " end"], ["Pari"], "The ", "Pari"),
        (["The ", "Paris", " end"], ["s en"], "The Pari", "s en"),
        (["The ", "Paris", " end"], ["end", "ari"], "The P", "ari"),
        (["ABC", "DEF", "G", "HI", "J"], ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["Mars", "?\n"], ["\n"], "Mars?", "\n"),
        (["ok", "??"], ["???"], "ok??", None),
        (["é", "y"], ["éx"], "éy", None),
        (["好", "。", "完"], ["。完"], "好", "。完"),
        ([*cut("🙂".encode(), [1, 1, 1, 1]), "!"], ["🙂!"], "", "🙂!"),
        (["aab"], ["ab"], "a", "ab"),
        (["abab", "ac"], ["abac"], "ab", "abac"),
        (["x", "ab", "c"], ["ab", "abc"], "x", "ab"),
        (["xabc"], ["ab", "abc"], "x", "abc"),
        (["xabcd"], ["bc", "abcd"], "x", "abcd"),
        (["xabc", "d"], ["bc", "abcd"], "xa", "bc"),
        (["xbcab"], ["ab", "bc"], "x", "bc"),
        (["xabc"], ["c", "bc"], "xa", "bc"),
        (["a"], ["a", "a"], "", "a"),
    ],
)
def test_text_is_cut_at_the_first_stop_string(
    tokens: list[str | bytes], stop: list[str], text: str, matched: str | None
) -> None:
    """B05: a stop string works only where a token ends with it. B07: the text before it in the same token is lost."""
    texts, got = script(tokens, stop)
    assert ("".join(texts), got) == (text, matched)
    including, got = script(tokens, stop, include_stop=True)
    assert ("".join(including), got) == (text + (matched or ""), matched)


def test_text_that_cannot_become_a_stop_string_is_not_held() -> None:
    """B06: the beginning of a stop string leaks out, or a fixed number of characters is always held."""
    tokens = ["ABC", "DEF", "G", "HI", "J"]
    assert script(tokens, ["zzzzzzzzzz"])[0] == [*tokens, ""]
    assert script(["ab", "c", "ab"], ["abx"])[0] == ["", "abc", "", "ab"]


def test_an_empty_stop_string_is_refused() -> None:
    """B05: an empty stop string stops everything."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_text_after_the_match_is_dropped() -> None:
    stream = TextStream(ScriptTokenizer([b"x|y", b"z"]), ["|"])
    assert [stream.push([0]), stream.push([1]), stream.finish()] == [Delta("x", "|", 1), Delta(""), ""]


def test_a_stop_string_counts_only_from_min_new_tokens_on() -> None:
    tokens = ["test", "\n", "ab", "\n", "cd"]
    for minimum, text, steps in ((0, "test", 2), (2, "test", 2), (3, "test\nab", 4), (4, "test\nab", 4)):
        texts, matched = script(tokens, ["\n"], min_new_tokens=minimum)
        assert ("".join(texts), matched, len(texts) - 1) == (text, "\n", steps)
    assert script(tokens, ["\n"], min_new_tokens=5) == (["test", "\n", "ab", "\n", "cd", ""], None)


def test_a_stop_string_may_begin_before_min_new_tokens_but_not_end_there() -> None:
    assert script(["a", "b", "c"], ["bc"], min_new_tokens=3) == (["a", "", "", ""], "bc")
    assert script(["ab", "ab"], ["ab"], min_new_tokens=2) == (["ab", "", ""], "ab")


def test_a_replacement_character_of_the_end_does_not_match() -> None:
    assert script(["a", b"\xe4"], ["\ufffd"]) == (["a", "", "\ufffd"], None)
    assert script(["a", b"\xe4", "b"], ["\ufffd"]) == (["a", "", "", ""], "\ufffd")


_STOP = st.text(alphabet="ab好", min_size=1, max_size=6)


@given(
    stop=st.lists(_STOP, max_size=4),
    pieces=st.lists(st.tuples(st.text(alphabet="ab好c", max_size=5), st.booleans()), max_size=8),
    include=st.booleans(),
)
@settings(max_examples=700, deadline=None)
def test_matching_is_the_rule_of_the_module_and_holds_exactly_the_beginnings_of_stops(
    stop: list[str], pieces: list[tuple[str, bool]], include: bool
) -> None:
    matcher = StopMatcher(stop, include)
    emitted, seen, matched = "", "", None
    for text, allowed in pieces:
        given_out, matched = matcher.push(text, allowed)
        emitted += given_out
        seen += text
        if matched is not None:
            break
        held = max((n for s in stop for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert emitted == seen[: len(seen) - held]
    emitted += matcher.flush()

    assert (emitted, matched) == _whole(pieces, stop, include)


def _whole(pieces: list[tuple[str, bool]], stop: list[str], include: bool) -> tuple[str, str | None]:
    """By brute force: of all places where a stop string ends in this piece, the leftmost, then the longest."""
    seen = ""
    for text, allowed in pieces:
        ends = range(len(seen) + 1, len(seen) + len(text) + 1)
        seen += text
        complete = [(end - len(s), -len(s), s) for end in ends for s in stop if allowed and seen[:end].endswith(s)]
        if complete:
            begin, _, matched = min(complete)
            return seen[: begin + (len(matched) if include else 0)], matched
    return seen, None


def count_steps(work: Callable[[], object]) -> int:
    """How many lines of pellucid_server.text the work executes."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal steps
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        steps += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


@pytest.mark.parametrize("following", ["a", "c", "ab"])
def test_long_stop_strings_cost_no_more_per_character(following: str) -> None:
    def steps(stop_length: int, pushes: int = 2000) -> int:
        matcher = StopMatcher(["a" * stop_length + "b", "a" * (stop_length // 2) + "d"])
        return count_steps(lambda: [matcher.push(text) for text in ("a", following) * pushes])

    assert 0 < steps(20_000) <= 1.1 * steps(10)
    # What is held costs once, wherever it turns out to be no stop string.
    matcher = StopMatcher(["a" * 20_000 + "b"])
    held = count_steps(lambda: [matcher.push("a") for _ in range(15_000)])
    assert count_steps(lambda: matcher.push("x")) < held


@pytest.mark.parametrize("stop", [[], ["好好学习", "天天"], ["aaaaaaaaab"]])
def test_a_longer_output_costs_no_more_per_token(stop: list[str]) -> None:
    pieces = [*cut("好🔥".encode(), [1, 2, 2, 2]), b"aaa", "天".encode(), b"\xff"]

    def steps(repeats: int) -> int:
        stream = TextStream(ScriptTokenizer(pieces), stop)
        ids = list(range(len(pieces))) * repeats
        return count_steps(lambda: [stream.push([i]) for i in ids])

    few, many = steps(20), steps(200)
    assert few > 0
    assert many <= 10.2 * few


# ---- Real tokenizers: the stream is the decoded whole ----


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    llama = {"bos_token": "<s>", "eos_token": "</s>"}
    loaded: dict[str, Tokenizer] = {"character": CharacterTokenizer.train(["ab 好🙂é\n\tc"])}
    for kind, build, config in (
        ("byte_level_bpe", byte_level_bpe, {"eos_token": "<|endoftext|>"}),
        ("sentence_piece_unigram", sentence_piece_unigram, llama),
        ("sentence_piece_bpe", sentence_piece_bpe, llama),
    ):
        tokenizer = load_tokenizer(write(build(), Path(folder / kind), config))
        assert tokenizer is not None
        loaded[kind] = tokenizer
    return loaded


KINDS = ["character", "byte_level_bpe", "sentence_piece_unigram", "sentence_piece_bpe"]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), keep=st.booleans())
@settings(max_examples=200, deadline=None)
def test_joined_stream_is_the_decoded_whole(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, keep: bool
) -> None:
    """B03: the incremental decoder raises on some token sequences, or differs from decoding the whole."""
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("ab", add_special_tokens=False)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    stream = TextStream(tokenizer, keep_special_tokens=keep)
    pieces = [stream.push([token_id]).text for token_id in ids]
    text = "".join(pieces) + stream.finish()
    assert "ab" + text == tokenizer.decode([*prompt, *ids], keep_special_tokens=keep)
    # An output continues its prompt; decoded by itself, a SentencePiece output would lose a space at its beginning.
    if not kind.startswith("sentence_piece"):
        assert text == tokenizer.decode(ids, keep_special_tokens=keep)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), include=st.booleans(), minimum=st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_stops_cut_the_stream_at_the_earliest_match(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, include: bool, minimum: int
) -> None:
    """B05, B06, B07 for every kind of tokenizer: nothing of a stop string leaks, nothing else is lost or doubled."""
    tokenizer = tokenizers[kind]
    likely = tokenizer.encode("ab a  b好🙂 st\n", add_special_tokens=False)
    ids = data.draw(st.lists(st.sampled_from(likely) | st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    stop = data.draw(st.lists(st.text(alphabet="ab 好🙂\n\ufffd", min_size=1, max_size=3), max_size=3))
    stream = TextStream(tokenizer, stop, include, min_new_tokens=minimum)
    plain = IncrementalDetokenizer(tokenizer)
    got, matched = "", None
    pieces: list[tuple[str, bool]] = []
    for count, token_id in enumerate(ids, start=1):
        pieces.append((plain.push([token_id]), count >= minimum))
        if matched is None:
            delta = stream.push([token_id])
            got, matched = got + delta.text, delta.matched_stop
            assert matched is None or (got, matched) == _whole(pieces, stop, include)
    got += stream.finish()
    pieces.append((plain.flush(), False))
    assert (got, matched) == _whole(pieces, stop, include)


_BYTES = [
    b"a",
    b"b ",
    "好🙂".encode(),
    *(bytes([byte]) for byte in "好🙂é".encode()),
    b"\xed\xa0\x80",
    b"\xed",
    b"\xa0",
]
"""Whole characters, their parts, and surrogates, which are no characters."""


@given(data=st.data(), include=st.booleans(), keep=st.booleans(), minimum=st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_tokens_that_come_together_are_tokens_that_come_one_by_one(
    data: st.DataObject, include: bool, keep: bool, minimum: int
) -> None:
    """The same text, the same stop string at the same token; with it, the text up to there has come out by then."""
    tokenizer = ScriptTokenizer(_BYTES, {-1: b"<eos>", -2: "<好>".encode()})
    ids = data.draw(st.lists(st.integers(-2, len(_BYTES)), min_size=1, max_size=20))
    ends = sorted(data.draw(st.sets(st.integers(1, len(ids)))) | {len(ids)})
    stop = data.draw(st.lists(st.sampled_from(["ab", "b 好", "🙂", "\ufffd\ufffd", "<eos>", "é"]), max_size=2))

    def streamed(cuts: Iterable[Sequence[int]]) -> tuple[str, str | None, int]:
        stream, text, count = TextStream(tokenizer, stop, include, keep, minimum), "", 0
        for own in cuts:
            delta = stream.push(own)
            text += delta.text
            if delta.matched_stop is not None:
                assert 0 < delta.token_count <= len(own)
                assert stream.push(own) == Delta("")
                return text + stream.finish(), delta.matched_stop, count + delta.token_count
            assert delta.token_count == 0
            count += len(own)
        return text + stream.finish(), None, count

    together = streamed(ids[begin:end] for begin, end in itertools.pairwise([0, *ends]))
    assert together == streamed([token_id] for token_id in ids)
    if not stop:
        assert together[0] == tokenizer.decode(ids, keep_special_tokens=keep)
    alone, at_once = IncrementalDetokenizer(tokenizer, keep), IncrementalDetokenizer(tokenizer, keep)
    assert at_once.push(ids) == "".join([alone.push([token_id]) for token_id in ids]), "it holds more back"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a    b\n\n  c ", " a b", "  ", "\ta\n", "好🙂 é"])
def test_whitespace_survives(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    """B14: streamed words run together, because each piece is trimmed by itself."""
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("b", add_special_tokens=False)
    ids = tokenizer.encode("b" + text, add_special_tokens=False)[len(prompt) :]
    stream = TextStream(tokenizer)
    assert "".join(stream.push([i]).text for i in ids) + stream.finish() == text
