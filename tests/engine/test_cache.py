"""Accounting of blocks and slots: conservation, one owner each, freed once."""

from __future__ import annotations

import pytest

from engine.cache.block_pool import BlockPool, CacheAccountingError
from engine.cache.manager import CacheManager
from engine.cache.state_pool import StatePool
from engine.types import Request, SamplingParams


def request(name: str, length: int) -> Request:
    return Request(name, [1] * length, SamplingParams())


def test_block_and_slot_zero_are_never_handed_out() -> None:
    blocks, slots = BlockPool(5), StatePool(3)
    assert sorted(blocks.allocate(5, "a")) == [1, 2, 3, 4, 5]
    assert sorted(slots.allocate(f"r{i}") for i in range(3)) == [1, 2, 3]
    blocks.check()
    slots.check()


def test_blocks_freed_twice_or_by_a_stranger_are_refused_and_nothing_changes() -> None:
    pool = BlockPool(6)
    mine = pool.allocate(3, "a")
    for blocks, owner in ((mine, "b"), ([0], "a"), ([7], "a"), ([mine[0], mine[0]], "a"), ([*mine, 6], "a")):
        with pytest.raises(CacheAccountingError):
            pool.free(blocks, owner)
        assert pool.num_free == 3
        pool.check()
    pool.free(mine, "a")
    with pytest.raises(CacheAccountingError, match=r"a frees block \d, which is owned by None"):
        pool.free(mine, "a")
    assert pool.num_free == 6


def test_slots_freed_twice_or_by_a_stranger_are_refused() -> None:
    pool = StatePool(2)
    slot = pool.allocate("a")
    for wrong, owner in ((slot, "b"), (0, "a"), (3, "a"), (2, "a")):
        with pytest.raises(CacheAccountingError):
            pool.free(wrong, owner)
    pool.free(slot, "a")
    with pytest.raises(CacheAccountingError):
        pool.free(slot, "a")
    pool.check()


def test_too_few_free_ids_is_an_error_not_a_short_answer() -> None:
    blocks, slots = BlockPool(2), StatePool(1)
    with pytest.raises(CacheAccountingError, match="asked for 3 blocks, 2 are free"):
        blocks.allocate(3, "a")
    slots.allocate("a")
    with pytest.raises(CacheAccountingError, match="none is free"):
        slots.allocate("b")


def test_check_finds_a_lost_and_a_doubled_id() -> None:
    pool = BlockPool(4)
    pool.allocate(1, "a")
    pool._owner[1] = None  # lost: neither free nor owned
    with pytest.raises(CacheAccountingError):
        pool.check()
    pool = BlockPool(4)
    pool._free.append(4)
    with pytest.raises(CacheAccountingError):
        pool.check()


def test_admission_needs_both_memories() -> None:
    cache = CacheManager(num_blocks=4, block_size=16, num_slots=1)
    assert cache.max_tokens == 64
    assert cache.can_admit(64)
    assert not cache.can_admit(65)
    assert not cache.can_admit(64, reserve=1)
    first = request("a", 17)
    cache.admit(first)
    assert len(first.block_table) == 2
    assert first.slot == 1
    assert not cache.can_admit(1), "blocks are free, slots are not"
    cache.release(first)
    assert (first.block_table, first.slot, cache.blocks.num_used, cache.slots.num_used) == ([], 0, 0, 0)


def test_growth_takes_all_missing_blocks_or_none() -> None:
    cache = CacheManager(num_blocks=3, block_size=4, num_slots=2)
    a, b = request("a", 4), request("b", 4)
    cache.admit(a)
    cache.admit(b)
    assert cache.grow(a, 4)
    assert len(a.block_table) == 1
    assert not cache.grow(a, 12)
    assert len(a.block_table) == 1
    assert cache.grow(a, 8)
    assert len(a.block_table) == 2
    cache.check([a, b])


def test_manager_check_finds_leaks_and_foreign_blocks() -> None:
    cache = CacheManager(num_blocks=4, block_size=4, num_slots=2)
    a, b = request("a", 4), request("b", 4)
    cache.admit(a)
    cache.admit(b)
    with pytest.raises(CacheAccountingError, match="requests hold 1 and 1"):
        cache.check([a])
    b.block_table[0] = a.block_table[0]
    with pytest.raises(CacheAccountingError, match="uses block"):
        cache.check([a, b])


def test_admitting_or_releasing_twice_is_refused() -> None:
    cache = CacheManager(num_blocks=4, block_size=4, num_slots=2)
    a = request("a", 4)
    cache.admit(a)
    with pytest.raises(CacheAccountingError, match="already holds memory"):
        cache.admit(a)
    cache.release(a)
    with pytest.raises(CacheAccountingError):
        cache.release(a)
