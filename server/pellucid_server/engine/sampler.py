"""Chooses the next token of every row of a step.

In: the logits of the step and one SamplerRow per row. Out: one id per row. sampler_reference.py says what is computed;
the compiled kernels compute it here, or numpy where there are none, always with the same result.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pellucid_server.engine.adjustments import Adjustments
from pellucid_server.engine.messages import Sampling
from pellucid_server.engine.sampler_numpy import sample_row

_ROW = struct.Struct("=7dQ6Q8I")
"""The kernel's Row, in the order of its fields."""
_OUTPUT_INDEX = struct.Struct("=I")
"""Its last field."""


@dataclass(slots=True)
class SamplerRow:
    """Settings of one row. `output_index` may move on and the row be used again.

    banned          ids that may not be chosen, for example EOS before min_new_tokens
    output_index    how many tokens of the output came before, uint32
    sequence_index  which output of its request this is, uint32
    adjustments     what the sequence changes in its logits; None: nothing
    permitted       uint32 words [ceil(V / 32)] in which bit i tells whether id i may follow; None: every id may
    """

    sampling: Sampling
    banned: tuple[int, ...]
    output_index: int
    sequence_index: int = 0
    adjustments: Adjustments | None = None
    permitted: npt.NDArray[np.uint32] | None = None
    packed: bytearray | None = field(default=None, init=False, repr=False, compare=False)
    """The kernel's Row of a constant one, once it has been sampled."""

    @property
    def is_constant(self) -> bool:
        """Whether nothing but its place in the output changes from one token to the next."""
        adjusts = self.adjustments is not None and self.adjustments.history is not None
        return not (self.banned or adjusts or self.permitted is not None)

    @property
    def is_plain(self) -> bool:
        """Whether the sampling values alone say what may be chosen."""
        return not self.banned and self.adjustments is None and self.permitted is None


class Sampler:
    """Samples rows independently of each other, of their order and of the number of threads.

    vocab_size  ids from here on are never chosen, however wide the logits are
    library     the compiled kernels; None samples in numpy
    threads     at most so many, and only for steps that are worth it
    """

    def __init__(self, vocab_size: int, library: ctypes.CDLL | None = None, threads: int = 1) -> None:
        self._vocab_size = vocab_size
        self._threads = threads
        self._library = library
        if library is not None:
            _declare(library)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[int | None]:
        """The next token of each row; None where its logits are not finite, or no id is possible.

        logits  [R, V], float32 on the CPU, V >= vocab_size
        rows    R of them
        """
        self._check(logits, rows)
        if not rows:
            return []
        if self._library is not None:
            return self._sample_compiled(self._library, logits.contiguous(), rows)
        matrix: npt.NDArray[np.float32] = logits.numpy()[:, : self._vocab_size]
        return [
            sample_row(
                matrix[i],
                row.sampling,
                row.banned,
                row.sequence_index,
                row.output_index,
                row.adjustments,
                row.permitted,
            )
            for i, row in enumerate(rows)
        ]

    def _check(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> None:
        if logits.dtype != torch.float32 or logits.device.type != "cpu":
            raise ValueError(f"logits must be float32 on the CPU, not {logits.dtype} on {logits.device}")
        if logits.dim() != 2 or logits.shape[0] != len(rows) or logits.shape[1] < self._vocab_size:
            raise ValueError(f"logits must be [{len(rows)}, {self._vocab_size} or more], not {list(logits.shape)}")
        words = -(-self._vocab_size // 32)
        for row in rows:
            if row.permitted is not None and len(row.permitted) < words:
                raise ValueError(
                    f"permitted must be {words} words for {self._vocab_size} ids, not {len(row.permitted)}"
                )

    def _sample_compiled(
        self, library: ctypes.CDLL, logits: torch.Tensor, rows: Sequence[SamplerRow]
    ) -> list[int | None]:
        banned = array("i")
        settings = pack_rows(rows, banned)
        out = array("i", bytes(4 * len(rows)))
        library.pellucid_sample(
            logits.data_ptr(),
            len(rows),
            logits.stride(0),
            self._vocab_size,
            settings.buffer_info()[0],
            banned.buffer_info()[0],
            self._threads,
            out.buffer_info()[0],
        )
        return [None if token < 0 else token for token in out]


def pack_rows(rows: Sequence[SamplerRow], banned: array[int]) -> array[int]:
    """A kernel's Row of each, which point into the rows' arrays; `banned` is extended by their banned ids."""
    return array("B", b"".join([_pack(row, banned) for row in rows]))


def _pack(row: SamplerRow, banned: array[int]) -> bytes | bytearray:
    """One Row. It points into the row's arrays, which its SamplerRow keeps alive, and to its place in `banned`."""
    if row.packed is not None:
        _OUTPUT_INDEX.pack_into(row.packed, _ROW.size - _OUTPUT_INDEX.size, row.output_index)
        return row.packed
    banned_begin = len(banned)
    banned.extend(row.banned)
    packed = _packed(row, banned_begin, len(banned))
    if row.is_constant:
        row.packed = bytearray(packed)
    return packed


def _packed(row: SamplerRow, banned_begin: int, banned_end: int) -> bytes:
    sampling, adjustments = row.sampling, row.adjustments
    bias_ids = biases = allowed_ids = seen_ids = output_counts = (0, 0)
    if adjustments is not None:
        bias_ids, biases = adjustments.bias_ids.buffer_info(), adjustments.biases.buffer_info()
        allowed_ids = adjustments.allowed_ids.buffer_info()
        if adjustments.history is not None:
            seen_ids = adjustments.history.seen_ids.buffer_info()
            output_counts = adjustments.history.output_counts.buffer_info()
    return _ROW.pack(
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.typical_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.seed,
        bias_ids[0],
        biases[0],
        allowed_ids[0],
        seen_ids[0],
        output_counts[0],
        0 if row.permitted is None else row.permitted.ctypes.data,
        bias_ids[1],
        allowed_ids[1],
        seen_ids[1],
        banned_begin,
        banned_end,
        sampling.top_k,
        row.sequence_index,
        row.output_index,
    )


def _declare(library: ctypes.CDLL) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.pellucid_sample.argtypes = [pointer, size, size, size, pointer, pointer, ctypes.c_int, pointer]
    library.pellucid_sample.restype = None
