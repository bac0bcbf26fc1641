"""Which blocks have the same content, and how far a sequence can begin with blocks that are there."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_server.kv.prefix import PrefixChain, longest_start
from pellucid_server.kv.window import FULL, ContextWindow


def keys(
    tokens: list[int],
    *,
    namespace: bytes = b"model",
    salt: str = "",
    context: ContextWindow = FULL,
    native_window: int = 0,
    widest_window: int = 0,
    size: int = 4,
) -> list[bytes]:
    chain = PrefixChain(namespace, salt, size, context, native_window, widest_window or native_window)
    for begin in range(0, len(tokens) - size + 1, size):
        chain.append(tokens[begin : begin + size])
    return [chain[index].key for index in range(len(chain))]


def test_prompts_that_differ_anywhere_have_no_block_in_common_from_there_on() -> None:
    """Keys from a weak hash collide for prompts with moved sums, another order, or another first token (B48)."""
    base = list(range(40, 56))
    others = [
        [41, *base[1:]],
        [base[1], base[0], *base[2:]],
        [base[0] + 31, base[1] - 1, *base[2:]],
        base[4:8] + base[:4] + base[8:],
        [*base[:15], 99],
        [0, 0, 0, 0, *base[4:]],
    ]
    for one, two in itertools.combinations([base, *others], 2):
        first = next(index for index in range(16) if one[index] != two[index]) // 4
        assert keys(one)[:first] == keys(two)[:first]
        assert not set(keys(one)[first:]) & set(keys(two)[first:])


def test_blocks_of_another_model_or_salt_are_strangers() -> None:
    tokens = list(range(16))
    sets = [
        keys(tokens),
        keys(tokens, namespace=b"other"),
        keys(tokens, salt="a"),
        keys(tokens, salt="b"),
        keys(tokens, namespace=b"modela", salt=""),
        keys(tokens, namespace=b"mode", salt="la"),
    ]
    assert len(set(itertools.chain(*sets))) == 6 * 4


def test_what_a_window_shares() -> None:
    """Rows t < S + W of a rolling window are plain attention; later ones belong to this S and W."""
    tokens = list(range(32))
    plain = keys(tokens)
    rolling = keys(tokens, context=ContextWindow("roll", 2, 11))  # blocks of 4: 0, 1 and 2 end by token 13
    assert rolling[:3] == plain[:3]
    assert not set(rolling[3:]) & set(plain)
    for other in (ContextWindow("roll", 2, 12), ContextWindow("roll", 3, 11), ContextWindow("roll", 1, 12)):
        assert not set(keys(tokens, context=other)[4:]) & set(rolling[3:])
    assert keys(tokens, context=ContextWindow("reencode", 2, 11, 4)) == plain
    # Where no layer looks further than the rolling window does, it changes nothing.
    assert keys(tokens, context=ContextWindow("roll", 2, 11), native_window=11) == plain
    # A layer that would look further than W without it, does so no longer from token W on.
    for native, widest in ((12, 12), (0, 12)):
        cut = keys(tokens, context=ContextWindow("roll", 2, 11), native_window=native, widest_window=widest)
        assert cut[:2] == plain[:2]
        assert not set(cut[2:]) & {*plain, *rolling}
    assert keys(tokens, context=ContextWindow("roll", 2, 11), widest_window=11) == rolling


def test_a_chain_that_is_cut_goes_on_as_another() -> None:
    chain = PrefixChain(b"model", "", 2, FULL, 0, 0)
    for begin in range(0, 8, 2):
        chain.append([begin, begin + 1])
    chain.cut(2)
    chain.append([8, 9])
    assert [chain[index].key for index in range(3)] == keys([0, 1, 2, 3, 8, 9], size=2)


@given(
    present=st.lists(st.booleans(), max_size=12),
    sinks=st.integers(0, 3),
    window=st.none() | st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_longest_start_is_the_longest_without_a_gap_that_is_seen(
    present: list[bool], sinks: int, window: int | None
) -> None:
    def passed(count: int) -> range:
        return range(min(sinks, count), max(min(sinks, count), count - window)) if window is not None else range(0)

    def usable(count: int) -> bool:
        return all(present[index] or index in passed(count) for index in range(count))

    found = [7 if there else None for there in present]
    assert longest_start(found, passed) == max(count for count in range(len(present) + 1) if usable(count))
