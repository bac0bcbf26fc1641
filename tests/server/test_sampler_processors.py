"""The sampler's steps against the logits processors of the `transformers` library, where it has them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from pellucid_server.engine.sampler_reference import candidates
from pellucid_testing.sampling import sampling

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.generation import logits_process as theirs

VOCABULARY = 400


def _rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, VOCABULARY, generator=generator) * spread for spread in (0.3, 1.0, 3.0, 8.0)]


def _theirs(processors: list[Any], tokens: list[int], scores: torch.Tensor) -> dict[int, float]:
    """Probabilities of the ids that are left."""
    ids = torch.tensor([tokens])
    for processor in processors:
        scores = processor(ids, scores)
    probabilities = scores.double().softmax(-1)[0]
    return {i: float(probabilities[i]) for i in torch.isfinite(scores[0]).nonzero().flatten().tolist()}


def _ours(scores: torch.Tensor, prompt: list[int], output: list[int], **settings: Any) -> dict[int, float]:
    kept = candidates(scores[0].tolist(), VOCABULARY, sampling(**settings), (), prompt, output)
    weights = np.exp(list(kept.values()))
    return dict(zip(kept, (weights / weights.sum()).tolist(), strict=True))


@pytest.mark.parametrize(
    ("settings", "processors"),
    [
        ({"temperature": 0.7}, [theirs.TemperatureLogitsWarper(0.7)]),
        ({"top_k": 40}, [theirs.TopKLogitsWarper(40)]),
        ({"top_p": 0.8}, [theirs.TopPLogitsWarper(0.8)]),
        ({"min_p": 0.05}, [theirs.MinPLogitsWarper(0.05)]),
        ({"typical_p": 0.4}, [theirs.TypicalLogitsWarper(0.4)]),
        ({"typical_p": 0.95}, [theirs.TypicalLogitsWarper(0.95)]),
        ({"repetition_penalty": 1.5}, [theirs.RepetitionPenaltyLogitsProcessor(1.5)]),
        ({"repetition_penalty": 0.5}, [theirs.RepetitionPenaltyLogitsProcessor(0.5)]),
        (
            {
                "repetition_penalty": 1.25,
                "temperature": 1.5,
                "top_k": 60,
                "top_p": 0.9,
                "min_p": 0.01,
                "typical_p": 0.9,
            },
            [
                theirs.RepetitionPenaltyLogitsProcessor(1.25),
                theirs.TemperatureLogitsWarper(1.5),
                theirs.TopKLogitsWarper(60),
                theirs.TopPLogitsWarper(0.9),
                theirs.MinPLogitsWarper(0.01),
                theirs.TypicalLogitsWarper(0.9),
            ],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_the_same_ids_are_left_with_the_same_probabilities(settings: dict[str, Any], processors: list[Any]) -> None:
    for scores in _rows():
        prompt, output = [3, 9, 9, 200], [17, 3, 350]
        expected = _theirs(processors, prompt + output, scores.clone())
        assert _ours(scores, prompt, output, **settings) == pytest.approx(expected, rel=2e-5)


def test_a_bias_is_theirs() -> None:
    bias = {5: 4.0, 77: -100.0, 300: 0.25}
    processor = theirs.SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()])
    for scores in _rows():
        expected = _theirs([processor], [1], scores.clone())
        assert _ours(scores, [1], [], logit_bias=tuple(bias.items())) == pytest.approx(expected, rel=2e-5)
