"""The sampler's implementations, rows as the engine builds them, and a test for the distribution of what was drawn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pellucid_model.kernels.library import load_variant, supported_variants
from pellucid_server.engine.adjustments import Adjustments
from pellucid_server.engine.messages import Sampling
from pellucid_server.engine.sampler import Sampler, SamplerRow

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
IMPLEMENTATIONS = (*supported_variants(), "numpy")


def make_sampler(implementation: str, vocab_size: int, threads: int = 1) -> Sampler:
    library = None if implementation == "numpy" else load_variant(implementation)
    return Sampler(vocab_size, library, threads)


def sampling(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0, **others: Any
) -> Sampling:
    return Sampling(temperature, top_k, top_p, min_p, seed, **others)


def make_row(
    setting: Sampling,
    output_index: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    permitted: Collection[int] | None = None,
    banned: tuple[int, ...] = (),
) -> SamplerRow:
    """A row whose sequence consists of a prompt and an output, built as the engine builds it."""
    adjustments = Adjustments.of(setting, prompt)
    if adjustments is not None:
        for length in range(len(output) + 1):
            adjustments.follow([*prompt, *output[:length]])
    words = None if permitted is None else np.zeros(200, np.uint32)
    if words is not None:
        for i in permitted or ():
            words[i // 32] |= np.uint32(1 << i % 32)
    return SamplerRow(setting, banned, output_index, 0, adjustments, words)


def sample_one(
    implementation: str, logits: Sequence[float], row: SamplerRow, vocab_size: int | None = None
) -> int | None:
    sampler = make_sampler(implementation, len(logits) if vocab_size is None else vocab_size)
    return sampler.sample(torch.tensor([list(logits)], dtype=torch.float32), [row])[0]


def count_draws(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> npt.NDArray[np.int64]:
    """How often each id was drawn; logits [R, V]."""
    vocab_size = logits.shape[1]
    tokens = [token for token in make_sampler(IMPLEMENTATIONS[0], vocab_size).sample(logits, rows) if token is not None]
    assert len(tokens) == len(rows)
    return np.bincount(tokens, minlength=vocab_size)


# 99.9 % quantiles of the chi-squared distribution by degrees of freedom.
_QUANTILES = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}


def assert_follows(counts: npt.NDArray[np.int64], weights: Sequence[float]) -> None:
    """Assert that drawing from a distribution with these weights (of any sum) may have given these counts."""
    expected = np.array(weights) / sum(weights) * counts.sum()
    assert expected.min() > 5, "too few draws to tell"
    assert float(((counts - expected) ** 2 / expected).sum()) < _QUANTILES[len(weights) - 1]
