"""The block pool: references, publication, eviction, and that it notices what is wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid_server.kv.blocks import BlockPool
from pellucid_server.kv.prefix import BlockContent


def content(name: object) -> BlockContent:
    return BlockContent(str(name).encode(), b"tokens of " + str(name).encode())


def test_pool_notices_a_lost_and_a_shared_block() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    pool.check_integrity([held])
    for tables in ([], [held, held]):
        with pytest.raises(RuntimeError, match="tables hold blocks"):
            pool.check_integrity(tables)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 available"):
        pool.allocate(3)
    pool.share(held)
    pool.check_integrity([held, held])
    pool._free.append(held[0])
    with pytest.raises(RuntimeError, match="4 blocks exist"):
        pool.check_integrity([held, held])


def test_a_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(3)
    pool.share(held[:2])
    pool.release(held)
    assert (pool.used, pool.free, pool.cached) == (2, 2, 0)
    pool.release(held[:2])
    assert (pool.used, pool.free, pool.cached) == (0, 4, 0)


def test_published_blocks_are_kept_until_they_are_needed_and_found_until_then() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    for block in held:
        pool.publish(block, content(block))
    pool.release(held)
    assert (pool.used, pool.free, pool.cached, pool.available) == (0, 2, 2, 4)
    assert [pool.find(content(block)) for block in held] == held
    pool.share(held[:1])
    pool.check_integrity([held[:1]])
    assert (pool.used, pool.cached) == (1, 1)
    taken = pool.allocate(3)
    assert held[1] in taken
    assert pool.find(content(held[1])) is None
    assert pool.find(content(held[0])) == held[0]
    pool.check_integrity([held[:1], taken])


def test_the_longest_unused_goes_first_and_of_one_table_the_last() -> None:
    pool = BlockPool(6, 4)
    first, second, third = (pool.allocate(2) for _ in range(3))
    for block in (*first, *second, *third):
        pool.publish(block, content(block))
    pool.release(first)
    pool.release(second)
    pool.share(first)
    pool.release(first)
    pool.release(third, evict_first=True)
    order = [pool.allocate(1)[0] for _ in range(6)]
    assert order == [*third[::-1], *second[::-1], *first[::-1]]


def test_equal_digests_of_different_tokens_are_no_hit() -> None:
    """Block keys from a fast hash can collide by chance or on purpose; a request then reads another tenant's keys."""
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.publish(block, BlockContent(b"digest", b"theirs"))
    assert pool.find(BlockContent(b"digest", b"mine")) is None
    assert pool.find(BlockContent(b"digest", b"theirs")) == block


def test_of_two_blocks_with_one_content_the_first_is_published() -> None:
    pool = BlockPool(3, 4)
    held = pool.allocate(2)
    for block in held:
        pool.publish(block, content("same"))
    assert pool.find(content("same")) == held[0]
    assert not pool.is_published(held[1])
    pool.withdraw(held[0])
    pool.withdraw(held[1])
    assert pool.find(content("same")) is None
    pool.release(held)
    assert pool.free == 3


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_use_keeps_every_block_accounted_for(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(1, 12)), 4)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        event = data.draw(st.sampled_from(["allocate", "release", "publish", "share", "withdraw"]))
        if event == "allocate":
            tables.append(pool.allocate(data.draw(st.integers(0, pool.available))))
        elif event == "share":
            found = pool.find(content(data.draw(st.integers(0, 4))))
            if found is not None:
                pool.share([found])
                tables.append([found])
        elif tables:
            table = data.draw(st.sampled_from(tables))
            if event == "release":
                tables.remove(table)
                pool.release(table, evict_first=data.draw(st.booleans()))
            for block in table if event == "publish" else ():
                pool.publish(block, content(data.draw(st.integers(0, 4))))
            for block in table if event == "withdraw" else ():
                pool.withdraw(block)
        pool.check_integrity(tables)
        held = Counter(block for table in tables for block in table)
        assert pool.used == len(held)
        assert pool.used + pool.cached + pool.free == pool.count
        assert all(pool.references(block) == held[block] for block in range(pool.count))
