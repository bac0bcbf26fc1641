"""The sampler in torch operators gives the reference's token for every input; here on the CPU's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pellucid_server.engine import sampler_device
from pellucid_server.engine.sampler import SamplerRow
from pellucid_server.engine.sampler_device import (
    NO_ANSWER,
    UNDECIDED,
    DeviceSampler,
    _noise,
    _Settings,
    choose,
    philox_word,
)
from pellucid_server.engine.sampler_reference import gumbel_noise, philox, sample_row
from pellucid_testing.sampling import GREEDY, make_row, make_sampler, sampling

INF = math.inf
FEW = st.sampled_from([-INF, -3.0, -0.0, 0.0, 0.5, 1.0, 1.0000001, 7.0])
"""Of which rows have many that are equal."""
LOGITS = FEW | st.floats(-30, 30, width=32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[SamplerRow]]:
    size = draw(st.integers(1, 40))
    logits, rows = [], []
    for _ in range(draw(st.integers(1, 6))):
        logits.append(draw(st.lists(LOGITS, min_size=size, max_size=size)))
        setting = sampling(
            temperature=draw(st.sampled_from([0.0, 1e-30, 0.7, 1.0, 100.0])),
            top_k=draw(st.sampled_from([0, 1, 3, 2000])),
            top_p=draw(st.sampled_from([1.0, 1e-9, 0.5, 0.9, 1 - 1e-12])),
            min_p=draw(st.sampled_from([0.0, 0.3, 0.5])),
            seed=draw(st.integers(0, 2**64 - 1)),
            typical_p=draw(st.sampled_from([1.0, 1.0, 0.5])),
        )
        banned = (0,) if draw(st.booleans()) else ()
        rows.append(SamplerRow(setting, banned, draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**32 - 1))))
    return logits, rows


def expected(logits: Sequence[Sequence[float]], rows: Sequence[SamplerRow], vocab_size: int) -> list[int | None]:
    return [
        sample_row(values, vocab_size, row.sampling, row.banned, row.sequence_index, row.output_index)
        for values, row in zip(logits, rows, strict=True)
    ]


def sampled(logits: Sequence[Sequence[float]], rows: Sequence[SamplerRow], vocab_size: int) -> list[int | None]:
    sampler = DeviceSampler(vocab_size, make_sampler("numpy", vocab_size))
    return sampler.sample(torch.tensor(logits, dtype=torch.float32), rows)


@settings(max_examples=70, deadline=None)
@given(batches())
@example(([[1.0, 1.0, 1.0, 0.0]], [make_row(sampling(top_k=2, seed=3))]))  # a tie at the edge of top-k
@example(([[0.0, -0.0, 0.0]], [make_row(sampling(top_p=0.5, seed=1))]))  # zeros are equal; so are two weights
def test_tokens_are_the_references(batch: tuple[list[list[float]], list[SamplerRow]]) -> None:
    logits, rows = batch
    for vocab_size in {len(logits[0]), max(1, len(logits[0]) - 3)}:
        assert sampled(logits, rows, vocab_size) == expected(logits, rows, vocab_size)


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_rows_that_are_not_finite_have_no_token(bad: float) -> None:
    logits = [[0.0, bad, 1.0], [0.0, 5.0, 1.0], [-INF] * 3, [-INF, -INF, 2.0]] * 2
    rows = [make_row(setting) for setting in (GREEDY, sampling(top_k=2)) for _ in range(4)]
    assert sampled(logits, rows, 3) == [None, 1, None, 2] * 2
    assert sampled(logits, rows, 1) == [0, 0, None, None] * 2, "ids beyond the vocabulary do not count"


def real_looking(rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).bfloat16().float()  # bfloat16: many are equal


SETTINGS = {
    "greedy": GREEDY,
    "top-k": sampling(0.8, top_k=40),
    "top-p": sampling(0.8, top_p=0.5),
    "top-k, top-p, min-p": sampling(0.7, top_k=50, top_p=0.9, min_p=0.01),
    "everything": sampling(),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_large_vocabularies_are_decided_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by asking the CPU, which would always be right."""
    monkeypatch.setattr(sampler_device, "SLICE", 3 * 5000)  # more rows than noise is made for at once
    logits, vocab_size = real_looking(8, 5000), 5000
    rows = [SamplerRow(SETTINGS[name], (), output, 1) for output in range(8)]
    chosen = choose(logits, rows).tolist()
    assert UNDECIDED not in chosen
    assert chosen == make_sampler("numpy", vocab_size).sample(logits, rows)


def test_rows_that_need_more_candidates_ask_the_cpu() -> None:
    logits = torch.zeros(2, 3000)
    rows = [make_row(sampling(top_p=0.9, seed=1)), make_row(sampling(min_p=0.5, seed=1))]
    assert choose(logits, rows).tolist() == [UNDECIDED, UNDECIDED]
    assert sampled(logits.tolist(), rows, 3000) == expected(logits.tolist(), rows, 3000)


def test_draws_that_rounding_could_turn_ask_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = real_looking(64, 30)
    rows = [make_row(sampling(seed=seed)) for seed in range(64)]
    want = choose(logits, rows)
    monkeypatch.setattr(sampler_device, "_MARGIN", 0.5)
    careful = choose(logits, rows)
    assert 0 < int((careful == UNDECIDED).sum()) < 64
    assert torch.equal(careful[careful != UNDECIDED], want[careful != UNDECIDED])
    assert NO_ANSWER not in want


def test_edges_that_rounding_could_move_ask_the_cpu() -> None:
    equal, halved = [0.0, 0.0, -30.0], [0.0, float(np.float32(math.log(0.5))), -30.0]
    edges = [(equal, sampling(top_p=0.5)), (halved, sampling(min_p=math.exp(halved[1])))]
    beside = [(equal, sampling(top_p=0.501)), (halved, sampling(min_p=0.501))]
    for cases, undecided in ((edges, True), (beside, False)):
        logits, rows = torch.tensor([values for values, _ in cases]), [make_row(setting) for _, setting in cases]
        assert [answer == UNDECIDED for answer in choose(logits, rows).tolist()] == [undecided] * 2
        assert sampled(logits.tolist(), rows, 3) == expected(logits.tolist(), rows, 3)


def test_noise_is_the_references() -> None:
    ids = torch.tensor([[0, 1, 49151, 2**31 + 5, 2**32 - 1]])
    for seed in (0, 0x0123456789ABCDEF, 2**64 - 1):
        for output, sequence in ((0, 0), (2**32 - 1, 2**32 - 1), (17, 3)):
            key = tuple(torch.tensor([[word]]) for word in (seed & 0xFFFFFFFF, seed >> 32))
            words = philox_word(ids, torch.tensor([[output]]), torch.tensor([[sequence]]), key)  # type: ignore[arg-type]
            want = [philox((i, output, sequence, 0), (seed & 0xFFFFFFFF, seed >> 32))[0] for i in ids[0].tolist()]
            assert words[0].tolist() == want
            row = SamplerRow(sampling(seed=seed), (), output, sequence)
            noise = _noise(ids, _Settings.of([row], ids.device))
            exact = [gumbel_noise(seed, sequence, output, i) for i in ids[0].tolist()]
            assert noise[0].tolist() == pytest.approx(exact, abs=1e-12), "double precision"


def test_more_than_the_device_does_goes_to_the_cpu() -> None:
    logits = [[float(np.cos(3 * i + row)) for i in range(64)] for row in range(5)]
    rows = [
        make_row(sampling(logit_bias=((5, 9.0),), seed=4)),
        make_row(sampling(repetition_penalty=1.5), prompt=[1, 2], output=[3]),
        make_row(GREEDY, permitted=[7, 9]),
        make_row(GREEDY, banned=(0, 1, 2)),
        make_row(sampling(typical_p=0.4)),
    ]
    assert sampled(logits, rows, 64) == make_sampler("numpy", 64).sample(torch.tensor(logits), rows)
