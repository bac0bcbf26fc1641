"""The arithmetic of windows against their definitions, token by token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_server.kv.window import ContextWindow

SIZES = {"sinks": st.integers(0, 6), "window": st.integers(1, 20)}


def seen(policy: ContextWindow, t: int) -> list[int]:
    """The tokens that t sees, from the formulas of the documentation."""
    sinks, window, hop = policy.sinks, policy.window, policy.hop
    if policy.kind == "full" or t < sinks + window:
        return list(range(t + 1))
    if policy.kind == "roll":
        return [*range(sinks), *range(t - window + 1, t + 1)]
    origin = sinks
    while t + 1 - origin > window:
        origin += hop
    return [*range(sinks), *range(origin, t + 1)]


@given(**SIZES, data=st.data(), kind=st.sampled_from(["roll", "reencode"]))
@settings(deadline=None)
def test_what_is_seen(kind: str, sinks: int, window: int, data: st.DataObject) -> None:
    hop = data.draw(st.integers(1, window))
    policy = ContextWindow(kind, sinks, window, hop)  # type: ignore[arg-type]
    for t in range(4 * (sinks + window) + 3):
        tokens = seen(policy, t)
        assert policy.unseen(t) == t + 1 - len(tokens)
        assert len(tokens) <= policy.span
        behind_sinks = [token for token in tokens if token >= sinks]
        if kind == "roll":
            assert policy.offset(t) == 0
            if t >= policy.span:
                assert policy.first_kept(t) == behind_sinks[0]
        elif t >= policy.span:
            assert sinks + policy.offset(t) == behind_sinks[0]
            assert len(behind_sinks) > window - hop
        step = hop if kind == "reencode" else 1
        assert policy.moves(0, t) == policy.unseen(t) // step


def test_full_keeps_everything() -> None:
    policy = ContextWindow()
    assert [policy.offset(10**6), policy.first_kept(10**6), policy.unseen(10**6), policy.moves(0, 10**6)] == [0] * 4
    assert policy.blocks_needed(33, 16) == 3


@given(**SIZES, block_size=st.sampled_from([1, 2, 4, 16]), length=st.integers(1, 200))
@settings(deadline=None)
def test_blocks_that_are_always_enough(sinks: int, window: int, block_size: int, length: int) -> None:
    policy = ContextWindow("roll", sinks, window)
    most = 0
    for t in range(length):
        held = {token // block_size for token in seen(policy, t)}
        most = max(most, len(held))
    assert most <= policy.blocks_needed(length, block_size) <= most + 2
    reencode = ContextWindow("reencode", sinks, window, 1)
    assert reencode.blocks_needed(length, block_size) == -(-min(length, sinks + window) // block_size)
