"""Lists on the command lines of benchmarks: types for argparse, whose errors say what is accepted."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection


def words(accepted: Collection[str]) -> Callable[[str], list[str]]:
    """Some of these, separated by commas."""

    def parse(text: str) -> list[str]:
        for word in text.split(","):
            if word not in accepted:
                raise argparse.ArgumentTypeError(f"{word!r} is not accepted; accepted: {', '.join(accepted)}")
        return text.split(",")

    return parse


def whole_numbers(text: str) -> list[int]:
    """Such as 1,8,32."""
    return [number for (number,) in sizes(1)(text)]


def sizes(dimensions: int) -> Callable[[str], list[tuple[int, ...]]]:
    """Such as 3072x576,576x1536 of two dimensions; from 1 on."""
    form = re.compile("x".join([r"[1-9]\d*"] * dimensions), re.ASCII)

    def parse(text: str) -> list[tuple[int, ...]]:
        if not all(map(form.fullmatch, text.split(","))):
            shown = "x".join("N" * dimensions)
            raise argparse.ArgumentTypeError(
                f"{text!r} is not accepted; accepted: {shown},… of whole numbers from 1 on"
            )
        return [tuple(map(int, each.split("x"))) for each in text.split(",")]

    return parse
