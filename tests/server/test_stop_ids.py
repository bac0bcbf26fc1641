"""The ids that are named for stop strings are those with which one can be complete."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pellucid_model.tokenizers import ByteTokenizer, Tokenizer
from pellucid_server.text.stop_ids import MOST_IDS, StopIds
from pellucid_server.text.stream import TextStream

PIECES = ("a", "b", "ab", "ba\n", "é", " ", "##", "é".encode()[:1], "é".encode()[1:], "中".encode()[:2], b"\xad")
"""Some of which cut characters in two."""


def tokenizer_of(*pieces: str | bytes) -> Tokenizer:
    tokenizer = ByteTokenizer()
    tokenizer._bytes = tuple(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
    tokenizer.vocab_size = len(pieces)
    return tokenizer


STOPS = st.lists(st.text("ab\né #中\ufffd", min_size=1, max_size=3), min_size=1, max_size=3)


@given(STOPS, st.lists(st.integers(0, len(PIECES) - 1), max_size=12))
def test_no_other_token_completes_a_stop_string(stops: list[str], tokens: list[int]) -> None:
    tokenizer = tokenizer_of(*PIECES)
    named = StopIds(tokenizer).of(stops)
    stream = TextStream(tokenizer, stops)
    for token in tokens:
        if stream.push([token]).matched_stop is not None:
            assert named is None or token in named
            return


def test_few_ids_are_named_and_of_many_none() -> None:
    ids = StopIds(tokenizer_of(*PIECES))
    assert ids.of(["ab\n"]) == [3]
    assert ids.of(["a"]) == [0, 2, 3]
    assert ids.of(["x"]) == []
    assert ids.of(["é"]) == [4, 8]
    assert ids.of(["a", "\ufffd"]) is None
    assert StopIds(tokenizer_of(*["a"] * MOST_IDS)).of(["a"]) == [*range(MOST_IDS)]
    assert StopIds(tokenizer_of(*["a"] * (MOST_IDS + 1))).of(["a"]) is None
