"""The sampler for machines without compiled kernels: sampler_reference.py in numpy, with the same result.

Where numpy's rounding is not the C library's (exp and log), it only narrows the choice: values that decide are
computed by the reference's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pellucid_server.engine.adjustments import Adjustments
from pellucid_server.engine.messages import Sampling
from pellucid_server.engine.sampler_reference import FLOAT32_MAX, WEIGHT_SCALE, gumbel_noise

_MARGIN = 1e-6
"""Far more than numpy's logarithms can be off."""


def sample_row(
    logits: npt.NDArray[np.float32],
    sampling: Sampling,
    banned: Sequence[int],
    sequence_index: int,
    output_index: int,
    adjustments: Adjustments | None = None,
    permitted: npt.NDArray[np.uint32] | None = None,
) -> int | None:
    """See sampler_reference.sample_row. `logits` [V] holds the ids that may be chosen and no others."""
    if not (logits < np.inf).all():
        return None
    row = logits.astype(np.float64)
    if adjustments is not None:
        _adjust(row, sampling, adjustments)
    if permitted is not None:
        bits = np.unpackbits(permitted.view(np.uint8), bitorder="little")[: len(row)]
        row[bits == 0] = -np.inf
    row[_inside(row, banned)] = -np.inf
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
        size = _reaching(_weights(z), sampling.top_p)
        kept, z = kept[:size], z[:size]
    if sampling.min_p > 0:
        likely = _exp(z) >= sampling.min_p
        kept, z = kept[likely], z[likely]
    if sampling.typical_p < 1:
        kept, z = _typical(kept, z, sampling.typical_p)
    return _draw(kept, z, sampling.seed, sequence_index, output_index)


def _inside(row: npt.NDArray[np.float64], ids: Sequence[int]) -> list[int]:
    return [i for i in ids if 0 <= i < len(row)]


def _adjust(row: npt.NDArray[np.float64], sampling: Sampling, adjustments: Adjustments) -> None:
    """Allowed ids, then the reference's steps 2 and 3; in place."""
    if adjustments.allowed_ids:
        allowed = _inside(row, adjustments.allowed_ids)
        kept = row[allowed]
        row[:] = -np.inf
        row[allowed] = kept
    for i, bias in zip(adjustments.bias_ids, adjustments.biases, strict=True):
        if i < len(row):
            row[i] = _float32(row[i] + bias)
    if (history := adjustments.history) is None:
        return
    places = np.array(_inside(row, history.seen_ids), np.int64)
    counts = np.array([n for i, n in zip(history.seen_ids, history.output_counts, strict=True) if i < len(row)])
    seen, penalty = row[places], sampling.repetition_penalty
    if penalty != 1:
        seen = _float32(np.where(seen > 0, seen / penalty, seen * penalty))
    flat = _float32(seen - (sampling.presence_penalty + sampling.frequency_penalty * counts))
    row[places] = np.where(counts > 0, flat, seen)


def _float32(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    saturated = np.where(np.isinf(x), x, np.clip(x, -FLOAT32_MAX, FLOAT32_MAX))
    return saturated.astype(np.float32).astype(np.float64)


def _exp(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.array([math.exp(value) for value in z.tolist()])


def _weights(z: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return (_exp(z) * WEIGHT_SCALE).astype(np.int64)


def _reaching(weights: npt.NDArray[np.int64], share: float) -> int:
    """How many of the first weights hold `share` of all."""
    sums = np.cumsum(weights).astype(np.float64)
    return int(np.searchsorted(sums, share * sums[-1], side="left")) + 1


def _typical(
    ids: npt.NDArray[np.int64], z: npt.NDArray[np.float64], share: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The reference's step 9, the most typical first."""
    weights = _weights(z)
    ids, z, weights = ids[weights > 0], z[weights > 0], weights[weights > 0]
    mean = -(float((weights * -z).astype(np.int64).sum()) / float(weights.sum()))
    order = np.lexsort((ids, np.abs(z - mean)))
    order = order[: _reaching(weights[order], share)]
    return ids[order], z[order]


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
