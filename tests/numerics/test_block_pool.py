"""Pools of memory: what nobody sees is handed out again, and how much of it is kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psync.errors import UsageError
from psync.numerics.memory import BlockPool

KIB = 1 << 10


class TestPool:
    def test_recycles_what_nobody_sees(self) -> None:
        pool = BlockPool()
        root = pool.take(8 * KIB)
        address = root.ctypes.data
        pool.give(root)
        del root
        assert pool.take(8 * KIB).ctypes.data == address
        assert pool.statistics().hits == 1

    def test_never_hands_out_what_somebody_sees(self) -> None:
        pool = BlockPool()
        root = pool.take(8 * KIB)
        address = root.ctypes.data
        pool.give(root)
        view = memoryview(root)[3:5]
        del root
        other = pool.take(8 * KIB)
        assert other.ctypes.data != address
        assert pool.statistics().misses == 2
        del view
        assert pool.take(8 * KIB).ctypes.data == address

    def test_giver_itself_counts_as_somebody(self) -> None:
        pool = BlockPool()
        root = pool.take(8 * KIB)
        pool.give(root)
        assert pool.take(8 * KIB) is not root

    def test_giving_twice_does_not_hand_out_twice(self) -> None:
        pool = BlockPool()
        root = pool.take(8 * KIB)
        pool.give(root)
        pool.give(root)
        del root
        first = pool.take(8 * KIB)
        second = pool.take(8 * KIB)
        assert first is not second
        assert pool.statistics().roots == 0

    def test_other_size_is_not_used(self) -> None:
        pool = BlockPool()
        pool.give(pool.take(8 * KIB))
        assert pool.take(9 * KIB).nbytes == 9 * KIB
        assert pool.statistics().hits == 0

    def test_finds_a_free_root_behind_held_ones_in_bounded_work(self) -> None:
        pool = BlockPool()
        held = [pool.take(8 * KIB) for _ in range(20)]
        for root in held:
            pool.give(root)
        free = pool.take(8 * KIB)
        address = free.ctypes.data
        pool.give(free)
        del free, root
        taken = [pool.take(8 * KIB) for _ in range(3)]  # each looks at eight
        assert [root.ctypes.data == address for root in taken] == [False, False, True]

    def test_bounded_in_bytes_least_recently_given_first(self) -> None:
        pool = BlockPool(max_bytes=16 * KIB)
        first, second, third = (pool.take(8 * KIB) for _ in range(3))
        addresses = [first.ctypes.data, second.ctypes.data, third.ctypes.data]
        pool.give(first)
        pool.give(second)
        pool.give(first)  # used again: second is now the oldest
        pool.give(third)
        statistics = pool.statistics()
        assert (statistics.bytes, statistics.roots, statistics.evicted) == (16 * KIB, 2, 1)
        assert statistics.max_bytes == 16 * KIB
        del first, third
        assert {pool.take(8 * KIB).ctypes.data for _ in range(2)} <= {addresses[0], addresses[2]}

    def test_root_larger_than_the_bound_and_tiny_roots_are_not_kept(self) -> None:
        pool = BlockPool(max_bytes=16 * KIB)
        pool.give(np.empty(17 * KIB, np.uint8))
        pool.give(np.empty(64, np.uint8))
        pool.give(pool.take(0))
        assert pool.statistics().roots == 0

    def test_forgets_sizes_that_it_has_no_roots_of(self) -> None:
        pool = BlockPool()
        for extra in range(50):
            pool.give(pool.take(8 * KIB + extra))
        for extra in range(50):
            pool.take(8 * KIB + extra)
        assert not pool._by_size

    def test_refuses_views_and_other_arrays(self) -> None:
        pool = BlockPool()
        with pytest.raises(UsageError, match="only arrays that own their memory, got a view"):
            pool.give(np.empty(8 * KIB, np.uint8)[1:])
        with pytest.raises(UsageError, match="only 1-d uint8 arrays, got 1-d float32"):
            pool.give(np.empty(8 * KIB, np.float32))
        with pytest.raises(UsageError, match="only 1-d uint8 arrays, got 2-d uint8"):
            pool.give(np.empty((8, KIB), np.uint8))

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=60))
    def test_no_two_live_takers_share_memory(self, steps: list[tuple[int, int]]) -> None:
        """0 take, 1 take and keep a view only, 2 give and keep, 3 give and drop."""
        pool = BlockPool(max_bytes=5 * 4096)
        live: list[np.ndarray] = []
        for op, which in steps:
            if op == 0:
                live.append(pool.take(4096))
            elif op == 1:
                root = pool.take(4096)
                pool.give(root)
                live.append(root[which:])
                del root
            elif live and live[which % len(live)].base is None:
                pool.give(live[which % len(live)])
                if op == 3:
                    live.pop(which % len(live))
            for i, a in enumerate(live):
                for b in live[i + 1 :]:
                    assert not np.shares_memory(a, b)
            assert pool.statistics().bytes <= 5 * 4096


def test_what_is_lent_is_handed_out_again_when_nobody_sees_it() -> None:
    pool = BlockPool()
    first = pool.lend(8192)
    second = pool.lend(8192)
    assert second is not first
    address = first.__array_interface__["data"][0]
    del first
    again = pool.lend(8192)
    assert again.__array_interface__["data"][0] == address
    assert pool.take(8192) is not second


class TestMoreThanTheBoundIsLent:
    """A program that uses more at one time than a pool keeps by itself."""

    KEPT = 32 * KIB

    def pool(self, *, may_grow: bool = True) -> BlockPool:
        return BlockPool(self.KEPT, may_grow=lambda: may_grow)

    def use(self, pool: BlockPool, *sizes: int) -> int:
        """Have so much memory lent at one time; return how often it was new."""
        before = pool.statistics().misses
        lent = [pool.lend(size) for size in sizes]
        assert len({root.ctypes.data for root in lent}) == len(sizes)
        return pool.statistics().misses - before

    @pytest.mark.parametrize("sizes", [[64 * KIB], [8 * KIB] * 20, [48 * KIB, 8 * KIB, 16 * KIB]])
    def test_it_is_new_once(self, sizes: list[int]) -> None:
        pool = self.pool()
        assert [self.use(pool, *sizes) for _ in range(4)] == [len(sizes), 0, 0, 0]
        assert pool.nbytes == pool.statistics().bytes == sum(sizes)
        pool.shrink()
        assert pool.statistics().bytes <= self.KEPT
        assert self.use(pool, *sizes) > 0
        assert self.use(pool, *sizes) == 0

    def test_a_pool_that_may_not_grow_forgets_the_oldest_also_if_it_is_in_use(self) -> None:
        pool = self.pool(may_grow=False)
        assert [self.use(pool, *[8 * KIB] * 20) for _ in range(2)] == [20, 16]
        assert pool.statistics().bytes == self.KEPT

    def test_of_sizes_that_do_not_come_again_no_more_than_the_bound_is_kept(self) -> None:
        pool = self.pool()
        for extra in range(100):
            self.use(pool, 8 * KIB + extra, 4 * KIB + extra)
            assert pool.statistics().bytes <= self.KEPT

    def test_what_is_in_use_does_not_hide_what_nobody_sees(self) -> None:
        pool = self.pool()
        held = [pool.lend(4 * KIB) for _ in range(20)]
        for extra in range(100):
            self.use(pool, 8 * KIB + extra)
        assert pool.statistics().bytes <= len(held) * 4 * KIB + self.KEPT

    @given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=60))
    def test_never_is_it_lent_twice_and_shrunk_it_has_the_bound_or_what_is_in_use(
        self, steps: list[tuple[int, int]]
    ) -> None:
        """So many pages are lent, and the last ones of them kept."""
        pool, live = self.pool(), []
        for pages, kept in steps:
            live.append(pool.lend(pages * 4 * KIB))
            assert len({root.ctypes.data for root in live}) == len(live)
            live = live[len(live) - min(kept, len(live)) :]
        pool.shrink()
        assert pool.statistics().bytes <= max(self.KEPT, sum(root.nbytes for root in live))
