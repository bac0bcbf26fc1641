"""What a sequence keeps of its past when it grows beyond its context. Pure arithmetic, no state.

Tokens are numbered t = 0, 1, … over prompt and output. S sinks are the first tokens, which always stay; the window W
counts the token itself. Everything here is a function of t and the policy alone, never of the way there, so that a
prompt, its continuation, a preempted and a recovered sequence agree.

    full      every token sees all before it; the sequence ends where its room does.
    roll      t sees 0 … S-1 and t-W+1 … t. Keys stay as they were computed, so nothing is ever computed twice
              (attention sinks: Xiao et al. 2023, arXiv:2309.17453).
    reencode  t sees 0 … S-1 and origin(t) … t, at positions 0, 1, 2, … The origin moves by `hop` tokens at a time, and
              then the kept tokens are computed again at their new positions. S = 0, hop = 1 is "crop to the last W".
"""

from __future__ import annotations

from typing import Literal

import msgspec

WindowKind = Literal["full", "roll", "reencode"]


class ContextWindow(msgspec.Struct, frozen=True, array_like=True):
    """A policy with its numbers. `hop` counts for reencode only, `sinks` and `window` for both that slide."""

    kind: WindowKind = "full"
    sinks: int = 0
    window: int = 0
    hop: int = 1

    @property
    def span(self) -> int:
        """Tokens seen once the window is full; 0 where there is no window."""
        return self.sinks + self.window

    def offset(self, t: int) -> int:
        """Under reencode, how many tokens behind the sinks are left out of token t's view: origin(t) - S."""
        if self.kind != "reencode" or t < self.span:
            return 0
        return self.hop * -(-(t + 1 - self.span) // self.hop)

    def first_kept(self, t: int) -> int:
        """Under roll, the first token behind the sinks that token t or any later one sees."""
        return max(0, t - self.window + 1) if self.kind == "roll" else 0

    def unseen(self, t: int) -> int:
        """Tokens before t that t does not see."""
        return max(0, t + 1 - self.span) if self.kind == "roll" else self.offset(t)

    def moves(self, first: int, last: int) -> int:
        """How often the window moved between token `first` and token `last`: by one under roll, else by `hop`."""
        return (self.unseen(last) - self.unseen(first)) // (self.hop if self.kind == "reencode" else 1)

    def blocks_needed(self, length: int, block_size: int, native_window: int = 0) -> int:
        """KV blocks with which a sequence of `length` tokens can always go on, if only by one token at a time.

        native_window  the widest window of a model all of whose layers have one; else 0

        A window that slides over the blocks may begin and end in the middle of one, and sinks have blocks of their own.
        """
        blocks = -(-length // block_size)
        if self.kind == "reencode":
            blocks = min(blocks, -(-self.span // block_size))
        if self.kind == "roll":
            blocks = min(blocks, -(-self.sinks // block_size) + _straddled(self.window, block_size))
        return min(blocks, _straddled(native_window, block_size)) if native_window else blocks


FULL = ContextWindow()


def _straddled(window: int, block_size: int) -> int:
    """Blocks that `window` consecutive tokens touch at the most."""
    return -(-(window - 1) // block_size) + 1
