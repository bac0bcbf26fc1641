"""Finds stop strings in a text that arrives piece by piece (Aho and Corasick 1975).

In: pieces of text, however cut. Out: the text that a reader may see, and the stop string that ended it.

The rule: the output ends with the first piece that completes a stop string. Among those that it completes, the one
that begins first has matched; among those that begin together, the longest. A match that is complete is never held back
in the hope of a longer one, which would cost further tokens.

Text is held only while it may still become a stop string, that is, exactly the longest end of the text which is a
proper beginning of one. What has been given out is never taken back. Each character costs the same on average,
whatever the length of the stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Node:
    """A beginning of at least one stop string: the first `depth` characters of `spelled_by`."""

    spelled_by: str
    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    shorter: _Node | None = None
    """The longest proper end of this node's text that is a node too; None at the root."""
    longest_match: str | None = None
    """The longest stop string that this node's text ends with."""


class StopMatcher:
    """Watches one output.

    stop_strings          none of them empty; raises ValueError otherwise
    include_stop_in_text  give out the stop string itself, too
    """

    def __init__(self, stop_strings: Sequence[str], include_stop_in_text: bool = False) -> None:
        self._root = _build(stop_strings)
        self._node = self._root
        self._include_stop = include_stop_in_text
        self._over = False

    def push(self, text: str, allowed: bool = True) -> tuple[str, str | None]:
        """(text to give out, stop string that matched or None).

        allowed  whether a match may end in this piece; it may begin in a piece where it was not allowed

        After a match the output is over, and whatever is pushed then is dropped.
        """
        if self._over:
            return "", None
        before = self._node
        if before is self._root and self._root.next.keys().isdisjoint(text):
            return text, None
        best: tuple[int, int, str] | None = None  # begin, -length, stop string: the least is the match
        for end, character in enumerate(text, start=before.depth + 1):
            self._node = _advance(self._node, character)
            if allowed and (stop := self._node.longest_match) is not None:
                found = (end - len(stop), -len(stop), stop)
                best = found if best is None else min(best, found)
            # A whole stop string that was not allowed to match: only its end may still begin another one.
            while not self._node.next and self._node.shorter is not None:
                self._node = self._node.shorter
        if best is not None:
            self._over = True
            begin, _, matched = best
            return _beginning(before, text, begin + (len(matched) if self._include_stop else 0)), matched
        return _beginning(before, text, before.depth + len(text) - self._node.depth), None

    def flush(self) -> str:
        """The held text, once the output has ended without a match."""
        held = "" if self._over else self._node.spelled_by[: self._node.depth]
        self._over = True
        return held


def _beginning(held: _Node, text: str, length: int) -> str:
    """The first `length` characters of the held text followed by `text`, without copying what stays held."""
    return held.spelled_by[: min(length, held.depth)] + text[: max(0, length - held.depth)]


def _advance(node: _Node, character: str) -> _Node:
    """The longest end of node's text + character that is a node."""
    following: _Node | None = node
    while following is not None:
        if (found := following.next.get(character)) is not None:
            return found
        node, following = following, following.shorter
    return node


def _build(stop_strings: Sequence[str]) -> _Node:
    root = _Node("", 0)
    for stop in stop_strings:
        if not stop:
            raise ValueError("stop_strings: an empty string cannot be a stop string")
        node = root
        for depth, character in enumerate(stop, start=1):
            node = node.next.setdefault(character, _Node(stop, depth))
        node.longest_match = stop
    # Breadth first: every shorter node is finished before it is needed.
    waiting = deque(root.next.values())
    for node in waiting:
        node.shorter = root
    while waiting:
        node = waiting.popleft()
        shorter = node.shorter or root
        if node.longest_match is None:
            node.longest_match = shorter.longest_match
        for character, child in node.next.items():
            child.shorter = _advance(shorter, character)
            waiting.append(child)
    return root
