"""Lists on the command lines of benchmarks: what is taken, and what is said of the rest."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from pellucid_benchmark.arguments import sizes, whole_numbers, words

NO_NUMBERS = ("", "0", "-1", "1,", "x", "1x2")
NO_SIZES = ("x", "1", "1x", "1x0", "1x2x3", "1xx2")


def test_lists_are_read() -> None:
    assert words(["a", "b+c"])("b+c,a") == ["b+c", "a"]
    assert whole_numbers("1,32") == [1, 32]
    assert sizes(2)("3072x576,1x1") == [(3072, 576), (1, 1)]
    assert sizes(3)("9x3x64") == [(9, 3, 64)]


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (words(["a", "b"]), "a,c", "'c' is not accepted; accepted: a, b"),
        (words(["a"]), "", "'' is not accepted; accepted: a"),
        *((whole_numbers, text, f"{text!r} is not accepted; accepted: N,…") for text in NO_NUMBERS),
        *((sizes(2), text, f"{text!r} is not accepted; accepted: NxN,…") for text in NO_SIZES),
    ],
)
def test_the_rest_is_refused(parse: Callable[[str], Any], text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse(text)
    assert str(caught.value).startswith(says)
