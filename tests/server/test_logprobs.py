"""Log-probabilities: of the model's own distribution, finite, and the same from every implementation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_model.kernels.library import load_variant
from pellucid_server.engine.logprobs import Logprobs
from pellucid_server.engine.logprobs_reference import LOWEST, token_logprob
from pellucid_server.engine.messages import LogprobWish, TokenLogprob
from pellucid_testing.sampling import IMPLEMENTATIONS

INF = math.inf


def make(implementation: str, vocab_size: int, threads: int = 1) -> Logprobs:
    return Logprobs(vocab_size, None if implementation == "numpy" else load_variant(implementation), threads)


def read_one(
    implementation: str, logits: list[float], token: int, wish: LogprobWish, vocab_size: int | None = None
) -> TokenLogprob | None:
    reader = make(implementation, len(logits) if vocab_size is None else vocab_size)
    return reader.read(torch.tensor([logits], dtype=torch.float32), [token], [wish])[0]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


_LOGIT = st.one_of(
    st.integers(-3, 3).map(float),
    st.sampled_from([0.0, -0.0, -INF, 60000.0, -60000.0, 3.4e38, -3.4e38]),
    st.floats(-20, 20, width=32),
)


@given(
    logits=st.lists(_LOGIT, min_size=1, max_size=60),
    beyond=st.lists(st.sampled_from([9.0, INF, math.nan]), max_size=2),
    tokens=st.lists(st.integers(0, 63), min_size=1, max_size=4),
    top_count=st.sampled_from([0, 1, 3, 60, 1000]),
    asked=st.lists(st.integers(0, 63), max_size=4).map(tuple),
)
@settings(max_examples=300, deadline=None)
def test_every_implementation_gives_the_reference_answer(
    logits: list[float], beyond: list[float], tokens: list[int], top_count: int, asked: tuple[int, ...]
) -> None:
    size, wish = len(logits), LogprobWish(top_count, asked)
    single = np.array(logits, np.float32).tolist()
    expected = [token_logprob(single, size, token, wish) for token in tokens]
    matrix = torch.tensor([[*logits, *beyond]] * len(tokens), dtype=torch.float32)
    for name in IMPLEMENTATIONS:
        got = make(name, size).read(matrix, tokens, [wish] * len(tokens))
        for ours, reference in zip(got, expected, strict=True):
            assert_alike(ours, reference)


def assert_alike(ours: TokenLogprob | None, reference: TokenLogprob | None) -> None:
    """The same ids and ranks; values that differ by rounding at most."""
    if ours is None or reference is None:
        assert ours is reference
        return
    rows = [[(t.token_id, t.logprob, t.rank), *t.alternatives] for t in (ours, reference)]
    assert [(i, rank) for i, _, rank in rows[0]] == [(i, rank) for i, _, rank in rows[1]]
    assert [x for _, x, _ in rows[0]] == pytest.approx([x for _, x, _ in rows[1]], rel=1e-12, abs=1e-12)


def test_values_are_the_log_softmax_whatever_the_settings(implementation: str) -> None:
    """B29: a filtered token has logprob -inf, and a JSON layer fails on it."""
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * 4
    expected = logits.double().log_softmax(-1)
    tokens, wish = [0, 123, 499], LogprobWish(3, (7, 8))
    for row, entry in enumerate(make(implementation, 500).read(logits, tokens, [wish] * 3)):
        assert entry is not None
        assert entry.logprob is not None
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-12)
        best = expected[row].topk(3)
        assert [i for i, _, _ in entry.alternatives] == [*best.indices.tolist(), 7, 8]
        assert [x for _, x, _ in entry.alternatives[:3]] == pytest.approx(best.values.tolist(), abs=1e-12)
        assert entry.rank == 1 + int((expected[row] > expected[row, tokens[row]]).sum())
        values = [entry.logprob, *(x for _, x, _ in entry.alternatives)]
        assert all(math.isfinite(x) and x <= 0 for x in values)
        assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_equal_logits_rank_by_id(implementation: str) -> None:
    entry = read_one(implementation, [1.0, 2.0, 1.0, 2.0], 2, LogprobWish(4))
    assert entry is not None
    assert entry.rank == 4
    assert [(i, rank) for i, _, rank in entry.alternatives] == [(1, 1), (3, 2), (0, 3), (2, 4)]


def test_an_impossible_id_is_finite_and_no_alternative_unless_asked_for(implementation: str) -> None:
    entry = read_one(implementation, [0.0, -INF, 0.0], 0, LogprobWish(3, (1, 1, 2)))
    assert entry is not None
    assert entry.logprob == pytest.approx(math.log(0.5))
    assert [(i, rank) for i, _, rank in entry.alternatives] == [(0, 1), (2, 2), (1, 3)]
    assert entry.alternatives[2][1] == LOWEST


def test_padding_is_no_part_of_the_distribution(implementation: str) -> None:
    """B70: ids beyond the tokenizer have the largest logits, and come out as tokens."""
    entry = read_one(implementation, [1.0, 0.0, 99.0], 0, LogprobWish(3, (2,)), vocab_size=2)
    assert entry is not None
    assert entry.rank == 1
    assert entry.logprob == pytest.approx(-math.log(1 + math.exp(-1)))
    assert [(i, rank) for i, _, rank in entry.alternatives] == [(0, 1), (1, 2), (2, 0)]
    padded = read_one(implementation, [1.0, 0.0, 99.0], 2, LogprobWish(), vocab_size=2)
    assert padded == TokenLogprob(2, LOWEST, 0)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_a_row_that_is_not_finite_has_no_answer_and_leaves_its_neighbours_alone(
    implementation: str, bad: float
) -> None:
    """B22: non-finite logits of one request raise in the sampler, or give id 0."""
    good, wish = [0.5, 0.25], LogprobWish(2)
    rows = torch.tensor([good, [bad, bad if bad == -INF else 1.0], good])
    first, spoilt, last = make(implementation, 2).read(rows, [1, 1, 1], [wish] * 3)
    assert spoilt is None
    assert first is not None
    assert first == last == read_one(implementation, good, 1, wish)


def test_rows_do_not_depend_on_each_other_or_on_threads(implementation: str) -> None:
    logits = torch.randn(24, 7000, generator=torch.Generator().manual_seed(2)) * 3
    tokens = [(i * 37) % 6990 for i in range(24)]
    wishes = [LogprobWish(i % 4, tuple(range(i % 3))) for i in range(24)]
    reader = make(implementation, 6990)
    alone = [reader.read(logits[i : i + 1], tokens[i : i + 1], wishes[i : i + 1])[0] for i in range(24)]
    for threads in (1, 3):
        assert make(implementation, 6990, threads).read(logits, tokens, wishes) == alone
    assert reader.read(logits.flip(0), tokens[::-1], wishes[::-1]) == alone[::-1]


def test_nothing_asked_is_nothing_read(implementation: str) -> None:
    assert make(implementation, 5).read(torch.empty(0, 5), [], []) == []
