"""What is in a full KV block, as a digest that two sequences have in common exactly where they could share the block.

Keys and values of a token depend on everything before it. So a block's digest covers the digest of the block before it,
its own token ids, and what else its values depend on:

    root      of each chain: the loaded model (a random name per load, so that no block outlives its weights or can be
              guessed by who does not belong here), and the caller's salt
    window    rows t < S + W of a rolling window are plain causal attention and shared as such; t < W where a layer has
              a wider window of its own, which W cuts short. Blocks that reach further are shared under the same S and W
              only. A re-encoded window's view is plain causal attention from position 0: it is hashed as the tokens it
              is.

Pure Python, no torch. Chains only grow and are cut; each full block is hashed once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pellucid_server.kv.window import ContextWindow

_DIGEST_BYTES = 32


class BlockContent(NamedTuple):
    """A full block's digest, and its own token ids as bytes, to be compared where the digests agree."""

    key: bytes
    tokens: bytes


class PrefixChain:
    """The contents of one sequence's full blocks, from the first on.

    namespace      bytes that differ for every loaded model
    native_window  the widest window of a model all of whose layers have one; else 0
    widest_window  the widest one that any layer has; else 0
    """

    def __init__(
        self,
        namespace: bytes,
        salt: str,
        block_size: int,
        context: ContextWindow,
        native_window: int,
        widest_window: int,
    ) -> None:
        self._root = _digest(namespace, salt.encode())
        self._block_size = block_size
        rolls = context.kind == "roll" and not 0 < native_window <= context.window
        plain = context.window if widest_window > context.window else context.span
        self._plain_tokens = plain if rolls else None
        self._window = f"roll {context.sinks} {context.window}".encode()
        self._contents: list[BlockContent] = []

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, index: int) -> BlockContent:
        return self._contents[index]

    def append(self, tokens: Sequence[int]) -> None:
        """Add the next block: `block_size` token ids."""
        ids = array("I", tokens).tobytes()
        end = (len(self._contents) + 1) * self._block_size
        window = self._window if self._plain_tokens is not None and end > self._plain_tokens else b""
        parent = self._contents[-1].key if self._contents else self._root
        self._contents.append(BlockContent(_digest(parent, window, ids), ids))

    def cut(self, count: int) -> None:
        """Forget all blocks but the first `count`."""
        del self._contents[count:]


def longest_start(found: Sequence[int | None], passed: Callable[[int], range]) -> int:
    """With how many of its first blocks a sequence can begin, so that nothing is missing that its next row looks at.

    found   the block with the content of each of the sequence's first blocks; None: there is none
    passed  for a number of blocks, which of them no later row looks at (a window has passed them by)
    """
    missing = [0]
    for block in found:
        missing.append(missing[-1] + (block is None))
    for count in range(len(found), 0, -1):
        unseen = passed(count)
        if missing[count] == missing[unseen.stop] - missing[unseen.start]:
            return count
    return 0


def _digest(*parts: bytes) -> bytes:
    """Of a list of byte strings: their lengths count, so that no two lists run into one another."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
