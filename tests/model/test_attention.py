"""The reference attention against loops over every query and key; the training attention against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pellucid_model.attention import ReferenceAttend, TrainingAttend
from pellucid_model.contract import Attend, Rotary
from pellucid_model.errors import ModelError
from pellucid_model.positions import alibi_slopes, rotate
from pellucid_model.windows import RollingAttend

HEADS, KV_HEADS, DIM = 6, 2, 4
VARIANTS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"window": 1},
    {"window": 3},
    {"softcap": 2.0},
    {"alibi_slopes": alibi_slopes(HEADS)},
    {"rotary": Rotary.from_base(DIM, 100.0)},
    {"rotary": Rotary.from_base(2, 100.0, interleaved=True), "window": 4, "softcap": 1.5},
    {"alibi_slopes": alibi_slopes(HEADS), "window": 2, "softcap": 3.0, "scale": 1.0},
    {"distance_bias": torch.randn(HEADS, 3, generator=torch.Generator().manual_seed(1))},
    {"distance_bias": torch.randn(HEADS, 20, generator=torch.Generator().manual_seed(2)), "window": 5, "softcap": 2.0},
]


def heads_of(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(tokens, heads, DIM, dtype=torch.float64, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """One sequence, a loop for every query, head and key."""
    positions = torch.arange(len(q))
    if "rotary" in options:
        q, k = rotate(q, positions, options["rotary"]), rotate(k, positions, options["rotary"])
    out = torch.zeros_like(q)
    for t in range(len(q)):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            first = max(0, t - options["window"] + 1) if "window" in options else 0
            weights = []
            for j in range(first, t + 1):
                score = float(q[t, head] @ k[j, kv_head]) * options.get("scale", DIM**-0.5)
                if "softcap" in options:
                    score = options["softcap"] * math.tanh(score / options["softcap"])
                if "alibi_slopes" in options:
                    score -= float(options["alibi_slopes"][head]) * (t - j)
                if "distance_bias" in options:
                    score += float(options["distance_bias"][head, min(t - j, options["distance_bias"].shape[1] - 1)])
                weights.append(math.exp(score))
            for weight, j in zip(weights, range(first, t + 1), strict=True):
                out[t, head] += weight / sum(weights) * v[j, kv_head]
    return out


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: "+".join(o) or "plain")
def test_reference_is_the_formula(options: dict[str, Any]) -> None:
    lengths = [1, 7, 3]
    q, k, v = heads_of(sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    out = ReferenceAttend(lengths, positions)(0, q, k, v, **options)
    split = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    want = torch.cat([by_hand(*parts, options) for parts in split])
    assert torch.allclose(out, want, atol=1e-12)


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: "+".join(o) or "plain")
def test_training_attention_equals_the_reference(options: dict[str, Any]) -> None:
    attend = TrainingAttend(rows=3, length=7)
    q, k, v = heads_of(21)
    want = ReferenceAttend([7, 7, 7], attend.positions)(0, q, k, v, **options)
    assert torch.allclose(attend(0, q, k, v, **options), want, atol=1e-12)


ATTENDS: list[Callable[[], Attend]] = [
    lambda: ReferenceAttend([7, 7], torch.arange(7).repeat(2)),
    lambda: TrainingAttend(rows=2, length=7),
]


@pytest.mark.parametrize("make", ATTENDS, ids=["reference", "training"])
def test_a_layer_reads_another_ones_keys_and_values(make: Callable[[], Attend]) -> None:
    rotary = Rotary.from_base(DIM, 100.0)
    q, k, v = heads_of(14)
    attend = make()
    for _ in range(2):  # as in two forwards of one training step
        attend(0, q, k, v, rotary=rotary)
        attend(1, q, -k, v)
        shared = attend(2, q + 1, kv_from=0, rotary=rotary)
        assert torch.equal(shared, make()(0, q + 1, k, v, rotary=rotary))
    with pytest.raises(ModelError, match="kv_from = 7"):
        attend(3, q, kv_from=7)
    with pytest.raises(ModelError, match="either k and v, or kv_from"):
        attend(3, q, k, v, kv_from=0)
    with pytest.raises(ModelError, match="either k and v, or kv_from"):
        attend(3, q, k)
    with pytest.raises(ModelError, match="not both"):
        attend(3, q, k, v, alibi_slopes=alibi_slopes(HEADS), distance_bias=torch.zeros(HEADS, 2))


def by_gathering(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Ordinary attention over what is gathered: [T, Hq, D]."""
    seen = attend.gathered(0, k, v, **options)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (seen.keys, seen.values))
    scores = torch.einsum("sqhd,skhd->shqk", seen.queries(q), keys) * DIM**-0.5
    weights = scores.masked_fill(~seen.mask[:, None], -torch.inf).softmax(-1)
    return seen.ragged(torch.einsum("shqk,skhd->sqhd", weights, values))


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"rotary": Rotary.from_base(DIM, 100.0), "window": 5}])
def test_what_is_gathered_is_what_attention_sees(options: dict[str, Any]) -> None:
    lengths = [1, 7, 3]
    positions = torch.cat([torch.arange(n) for n in lengths])
    q, k, v = heads_of(11)
    want = ReferenceAttend(lengths, positions)(0, q, k, v, **options)
    assert torch.allclose(by_gathering(ReferenceAttend(lengths, positions), q, k, v, **options), want, atol=1e-12)
    q, k, v = heads_of(21)
    want = TrainingAttend(3, 7)(0, q, k, v, **options)
    assert torch.allclose(by_gathering(TrainingAttend(3, 7), q, k, v, **options), want, atol=1e-12)
    want = RollingAttend(0, 4)(0, q, k, v, **options)
    assert torch.allclose(by_gathering(RollingAttend(0, 4), q, k, v, **options), want, atol=1e-12)


def test_gathered_distances_are_those_in_the_rolling_cache() -> None:
    _, k, v = heads_of(9)
    seen = RollingAttend(2, 3).gathered(0, k, v)
    assert seen.mask[0, 8].nonzero().flatten().tolist() == [0, 1, 6, 7, 8]
    assert seen.distance[0, 8][seen.mask[0, 8]].tolist() == [4, 3, 2, 1, 0]


def test_a_bias_by_distance_learns() -> None:
    table = torch.zeros(HEADS, 3, dtype=torch.float64, requires_grad=True)
    q, k, v = heads_of(14)
    TrainingAttend(rows=2, length=7)(0, q, k, v, distance_bias=table).square().sum().backward()
    assert table.grad is not None
    assert (table.grad.abs() > 1e-6).all()


def test_recorded_maps_are_causal_distributions() -> None:
    q, k, v = heads_of(5)
    attend = ReferenceAttend([2, 3], torch.tensor([0, 1, 0, 1, 2]), record=True)
    attend(4, q, k, v)
    assert attend.maps is not None
    maps = attend.maps[4]
    assert [list(one.shape) for one in maps] == [[HEADS, 2, 2], [HEADS, 3, 3]]
    for one in maps:
        assert torch.allclose(one.sum(-1), torch.ones(one.shape[:2], dtype=one.dtype))
        assert one.triu(1).abs().max() == 0


@pytest.mark.parametrize("window", [2, 5])
def test_window_counts_the_query_itself(window: int) -> None:
    """The key at distance window - 1 is seen, the one at distance window is not."""
    q, k, v = heads_of(8)
    positions = torch.arange(8)
    plain = ReferenceAttend([8], positions)(0, q, k, v, window=window)[-1]
    for distance, seen in ((window - 1, True), (window, False)):
        changed = v.clone()
        changed[7 - distance] += 1
        again = ReferenceAttend([8], positions)(0, q, k, changed, window=window)[-1]
        assert torch.equal(again, plain) is not seen
