"""Log-probabilities of tokens, for the rows that ask for them.

In: rows of logits, the token that each one led to, and what is asked for. Out: one TokenLogprob per row.
logprobs_reference.py says what is computed; the compiled kernels compute it here, or numpy where there are none, with
the same ids and ranks, and the same values up to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pellucid_server.engine.logprobs_reference import LOWEST
from pellucid_server.engine.messages import LogprobWish, TokenLogprob

Entry = tuple[int, float, int]
"""Token id, logprob, rank."""


@dataclass(frozen=True, slots=True)
class _Row:
    """What one row is asked for."""

    asked: list[int]
    """The token itself, then the wish's ids."""
    top_count: int


class Logprobs:
    """Reads log-probabilities out of logits.

    vocab_size  ids from here on are no part of the distribution, however wide the logits are
    library     the compiled kernels; None computes in numpy
    threads     at most so many, and only where it is worth it
    """

    def __init__(self, vocab_size: int, library: ctypes.CDLL | None = None, threads: int = 1) -> None:
        self._vocab_size = vocab_size
        self._threads = threads
        self._library = library
        if library is not None:
            _declare(library)

    def read(
        self, logits: torch.Tensor, tokens: Sequence[int], wishes: Sequence[LogprobWish]
    ) -> list[TokenLogprob | None]:
        """Each row's token in the row's distribution; None where its logits are not finite.

        logits          [R, V], float32 on the CPU, V >= vocab_size
        tokens, wishes  R of them
        """
        rows = [
            _Row([token, *wish.token_ids], min(wish.top_count, self._vocab_size))
            for token, wish in zip(tokens, wishes, strict=True)
        ]
        if not rows:
            return []
        if self._library is not None:
            return self._read_compiled(self._library, logits.contiguous(), rows)
        return [_read_numpy(logits[i, : self._vocab_size].numpy(), row) for i, row in enumerate(rows)]

    def _read_compiled(
        self, library: ctypes.CDLL, logits: torch.Tensor, rows: Sequence[_Row]
    ) -> list[TokenLogprob | None]:
        asked = np.array([i for row in rows for i in row.asked], np.int32)
        asked_begin = np.cumsum([0, *(len(row.asked) for row in rows)], dtype=np.int64)
        top_begin = np.cumsum([0, *(row.top_count for row in rows)], dtype=np.int64)
        logprobs, ranks = np.empty(len(asked)), np.empty(len(asked), np.int32)
        top_ids, top_logprobs = np.empty(top_begin[-1], np.int32), np.empty(top_begin[-1])
        finite = np.empty(len(rows), np.uint8)
        library.pellucid_logprobs(
            logits.data_ptr(),
            len(rows),
            logits.stride(0),
            self._vocab_size,
            *(array.ctypes.data for array in (asked, asked_begin, top_begin)),
            self._threads,
            *(array.ctypes.data for array in (logprobs, ranks, top_ids, top_logprobs, finite)),
        )
        answers: list[TokenLogprob | None] = []
        for r in range(len(rows)):
            own, top = slice(*asked_begin[r : r + 2]), slice(*top_begin[r : r + 2])
            likeliest = zip(top_ids[top].tolist(), top_logprobs[top].tolist(), strict=True)
            entries = list(zip(asked[own].tolist(), logprobs[own].tolist(), ranks[own].tolist(), strict=True))
            answers.append(_answer(entries, list(likeliest)) if finite[r] else None)
        return answers


def _read_numpy(logits: npt.NDArray[np.float32], row: _Row) -> TokenLogprob | None:
    if not (logits < np.inf).all() or logits.max() == -np.inf:
        return None
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    logprobs = np.maximum(shifted - np.log(np.exp(shifted).sum()), LOWEST)

    def entry(i: int) -> Entry:
        if i >= len(wide):
            return i, LOWEST, 0
        before = np.count_nonzero(wide[:i] >= wide[i]) + np.count_nonzero(wide[i + 1 :] > wide[i])
        return i, float(logprobs[i]), int(before) + 1

    top = np.argsort(-wide, kind="stable")[: row.top_count]
    top = top[wide[top] > -np.inf]
    return _answer([entry(i) for i in row.asked], list(zip(top.tolist(), logprobs[top].tolist(), strict=True)))


def _answer(asked: Sequence[Entry], likeliest: Sequence[tuple[int, float]]) -> TokenLogprob:
    """asked begins with the token itself; an id of -1 ends the likeliest."""
    ranked = [(i, logprob, rank) for rank, (i, logprob) in enumerate(likeliest, start=1) if i >= 0]
    known = {i for i, _, _ in ranked}
    others = {entry[0]: entry for entry in asked[1:] if entry[0] not in known}
    return TokenLogprob(*asked[0], (*ranked, *others.values()))


def _declare(library: ctypes.CDLL) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.pellucid_logprobs.argtypes = [pointer, *[size] * 3, *[pointer] * 3, ctypes.c_int, *[pointer] * 5]
    library.pellucid_logprobs.restype = None
