"""The sampler for machines without compiled kernels: sampler_reference.py in numpy, with the same result.

Where numpy's rounding is not the C library's (exp and log), it only narrows the choice: values that decide are
computed by the reference's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pellucid_server.engine.messages import Sampling
from pellucid_server.engine.sampler_reference import WEIGHT_SCALE, gumbel_noise

_MARGIN = 1e-6
"""Far more than numpy's logarithms can be off."""


def sample_row(
    logits: npt.NDArray[np.float32],
    sampling: Sampling,
    banned: Sequence[int],
    sequence_index: int,
    output_index: int,
) -> int | None:
    """See sampler_reference.sample_row. `logits` [V] holds the ids that may be chosen and no others."""
    if not (logits < np.inf).all():
        return None
    row = logits.astype(np.float64)
    row[[i for i in banned if 0 <= i < len(row)]] = -np.inf
    first = int(row.argmax())
    if row[first] == -np.inf:
        return None
    if sampling.temperature == 0:
        return first

    kept = np.flatnonzero(row > -np.inf)
    if 0 < sampling.top_k < len(kept) or sampling.top_p < 1:
        kept = kept[np.argsort(-row[kept], kind="stable")][: sampling.top_k or None]
    with np.errstate(over="ignore"):
        z = (row[kept] - row[first]) / sampling.temperature
    if sampling.top_p < 1:
        size = _nucleus_size(z, sampling.top_p)
        kept, z = kept[:size], z[:size]
    if sampling.min_p > 0:
        likely = _exp(z) >= sampling.min_p
        kept, z = kept[likely], z[likely]
    return _draw(kept, z, sampling.seed, sequence_index, output_index)


def _exp(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.array([math.exp(value) for value in z.tolist()])


def _nucleus_size(z: npt.NDArray[np.float64], top_p: float) -> int:
    sums = np.cumsum((_exp(z) * WEIGHT_SCALE).astype(np.int64)).astype(np.float64)
    return int(np.searchsorted(sums, top_p * sums[-1], side="left")) + 1


def _draw(
    ids: npt.NDArray[np.int64], z: npt.NDArray[np.float64], seed: int, sequence_index: int, output_index: int
) -> int:
    uniform = (_philox_words(ids, seed, sequence_index, output_index) + 0.5) * 2.0**-32
    scores = z - np.log(-np.log(uniform))
    close = np.flatnonzero(scores >= scores.max() - _MARGIN).tolist()

    def exact(index: int) -> tuple[float, int]:
        token_id = int(ids[index])
        return float(z[index]) + gumbel_noise(seed, sequence_index, output_index, token_id), -token_id

    return int(ids[max(close, key=exact)])


def _philox_words(
    ids: npt.NDArray[np.int64], seed: int, sequence_index: int, output_index: int
) -> npt.NDArray[np.uint64]:
    """sampler_reference.philox's first word for each id."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(value, np.uint64) for value in (ids, output_index, sequence_index, 0))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> half) ^ c1 ^ np.uint64(k0), product1 & mask
        c2, c3 = (product0 >> half) ^ c3 ^ np.uint64(k1), product0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0
