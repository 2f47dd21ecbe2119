"""Blocks that are copied on write, and pools of memory. Runs of blocks: test_block_runs.py."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops import for_each
from psync.errors import UsageError
from psync.numerics.memory import BLOCK_BYTES, Block, BlockArray, BlockPool, Scratch, bytes_of
from psync.specs import DTYPE_NAMES, dtype_of

F32 = np.dtype(np.float32)


def array_of(values: np.ndarray, pool: BlockPool | None = None) -> BlockArray:
    array = BlockArray(values.size, values.dtype, pool=pool)
    array.load(bytes_of(values), pool or BlockPool())
    return array


KIB = 1024


def joined(array: BlockArray, start: int = 0, stop: int | None = None) -> np.ndarray:
    return np.frombuffer(b"".join(array.export(start, stop)), array.dtype)


@for_each("name", DTYPE_NAMES)
def test_blocks_hold_whole_elements_and_cache_lines(name: str) -> None:
    assert BLOCK_BYTES % dtype_of(name).itemsize == 0
    assert BLOCK_BYTES % 64 == 0


@pytest.mark.promise("reads.stable")
class TestHeld:
    def test_new_block_is_not_held(self) -> None:
        block = Block(np.empty(64, np.uint8), F32)
        assert not block.held()

    def test_export_holds_until_it_is_dropped(self) -> None:
        block = Block(np.zeros(64, np.uint8), F32)
        view = block.export()
        assert block.held()
        del view
        assert not block.held()

    def test_release_of_an_export_ends_the_hold(self) -> None:
        block = Block(np.zeros(64, np.uint8), F32)
        view = block.export()
        view.release()
        # toreadonly() left nothing else behind
        assert not block.held()

    def test_slice_of_an_export_holds_after_the_export_is_gone(self) -> None:
        block = Block(np.zeros(64, np.uint8), F32)
        view = block.export()
        part = view[8:16].cast("B")
        del view
        assert block.held()
        del part
        assert not block.held()

    def test_array_made_of_an_export_holds(self) -> None:
        block = Block(np.zeros(64, np.uint8), F32)
        array = np.frombuffer(block.export(4, 12), F32)[1:]
        assert block.held()
        del array
        assert not block.held()

    def test_slice_of_the_inner_view_holds(self) -> None:
        """numpy collapses .base to the root, which is why the count is taken there."""
        block = Block(np.zeros(64, np.uint8), F32)
        part = block.array[2:4][1:]
        assert block.held()
        del part
        assert not block.held()

    def test_export_is_read_only_bytes(self) -> None:
        view = Block(np.zeros(64, np.uint8), F32).export()
        assert view.readonly
        assert view.format == "B"
        assert view.nbytes == 64


class TestBlockArray:
    @for_each("size", [0, 1, 262143, 262144, 262145, 600_000])
    def test_round_trip_over_block_boundaries(self, size: int) -> None:
        values = np.arange(size, dtype=np.float32)
        array = array_of(values)
        assert array.num_blocks == -(-size * 4 // BLOCK_BYTES)
        assert array.nbytes == size * 4
        assert np.array_equal(joined(array), values)

    @for_each("name", DTYPE_NAMES)
    def test_every_dtype(self, name: str) -> None:
        values = np.array([0, 1, 1, 0, 1], dtype_of(name)).reshape(5, 1)
        array = array_of(values)
        assert array.block(0).array.dtype == values.dtype
        assert np.array_equal(array.block(0).array, values.reshape(-1))

    def test_copies_its_source(self) -> None:
        values = np.zeros(4, np.float32)
        array = array_of(values)
        values += 1
        assert not joined(array).any()

    def test_source_may_be_strided(self) -> None:
        values = np.arange(12, dtype=np.int32).reshape(3, 4).T
        assert np.array_equal(joined(array_of(values)), values.reshape(-1))

    @for_each("fill", [0, 0.1, 1])
    def test_fill_appears_when_first_used(self, fill: float) -> None:
        array = BlockArray(300_000, F32, fill)
        assert array.num_made == 0
        assert np.array_equal(joined(array), np.full(300_000, fill, np.float32))

    def test_reading_a_fill_makes_no_blocks_and_is_not_changed_by_updates(self) -> None:
        pool = BlockPool()
        array = BlockArray(600_000, F32, 0.5)
        views = array.export()
        assert array.num_made == 0
        target = array.writable(1, pool)
        target.array[:] = 7
        assert not array.commit(1, target, pool)  # nobody has read this one
        assert np.array_equal(np.frombuffer(b"".join(views), F32), np.full(600_000, 0.5, F32))
        now = joined(array)
        assert (now == 7).sum() == 262_144
        assert (now == 0.5).sum() == 600_000 - 262_144

    @for_each(
        "dtype, fill",
        [
            ("float32", -0.0), ("float64", np.nan), ("int64", 2**63 - 1),
            ("uint64", 2**64 - 1), ("bool", True),
        ],
    )  # fmt: skip
    def test_fill_is_exact(self, dtype: str, fill: object) -> None:
        element = np.array(fill, dtype)
        array = BlockArray(3, np.dtype(dtype), element)
        expected = np.full(3, element).tobytes()
        assert b"".join(array.export()) == expected
        assert array.block(0).array.tobytes() == expected

    def test_fill_of_bfloat16(self) -> None:
        array = BlockArray(3, np.dtype(ml_dtypes.bfloat16), 0.5)
        assert array.block(0).array.astype(np.float32).tolist() == [0.5, 0.5, 0.5]

    @given(st.integers(0, 600_000), st.integers(0, 600_000))
    def test_range_export(self, start: int, stop: int) -> None:
        values = np.arange(600_000, dtype=np.int16)
        array = array_of(values)
        assert np.array_equal(joined(array, start, stop), values[start:stop])

    def test_update_of_an_unheld_block_is_in_place(self) -> None:
        pool = BlockPool()
        array = BlockArray(10, F32)
        source = array.block(0)
        target = array.writable(0, pool)
        assert target is source
        assert not array.commit(0, target, pool)

    def test_update_of_a_held_block_replaces_it(self) -> None:
        pool = BlockPool()
        array = BlockArray(300_000, F32)
        snapshot = array.export()
        before = b"".join(snapshot)
        target = array.writable(1, pool)
        assert target is not array.block(1)
        np.add(array.block(1).array, 1, out=target.array)
        assert array.commit(1, target, pool)
        assert b"".join(snapshot) == before
        assert joined(array).tolist().count(1.0) == 300_000 - 262_144
        assert array.bounds(1) == (262_144, 300_000)

    def test_replaced_memory_comes_back_when_the_reader_is_gone(self) -> None:
        pool = BlockPool()
        array = BlockArray(262_144, F32)
        snapshot = array.export()
        for _ in range(2):
            target = array.writable(0, pool)
            target.array[:] = 1
            array.commit(0, target, pool)
            del target
        assert pool.misses == 1  # the second update worked in place
        del snapshot
        gc.collect()
        _second = array.export()
        array.writable(0, pool)
        assert pool.hits == 1

    def test_commit_without_a_look_at_the_old_block(self) -> None:
        pool = BlockPool()
        array = BlockArray(4, F32)
        assert array.commit(0, Block(np.zeros(16, np.uint8), F32), pool)

    def test_half_precision_blocks_hold_the_elements_of_float32_blocks(self) -> None:
        half = BlockArray(600_000, np.dtype(np.float16))
        single = BlockArray(600_000, F32)
        assert [half.bounds(i) for i in range(3)] == [single.bounds(i) for i in range(3)]
        assert half.num_blocks == single.num_blocks == 3

    def test_float64_blocks_are_no_larger_than_others(self) -> None:
        array = BlockArray(600_000, np.dtype(np.float64))
        assert array.block(0).export().nbytes == BLOCK_BYTES


class TestBytesOf:
    def test_views_buffers_and_arrays_without_copy(self) -> None:
        data = bytearray(range(8))
        view = bytes_of(memoryview(data)[2:])
        data[2] = 99
        assert view[0] == 99
        array = np.zeros((2, 2), ml_dtypes.bfloat16)
        assert np.shares_memory(bytes_of(array), array)

    def test_empty(self) -> None:
        assert bytes_of(b"").shape == (0,)
        assert bytes_of(np.zeros((0, 3))).shape == (0,)


def test_blocks_that_come_into_being_are_0_whatever_the_source_of_their_memory_had() -> None:
    pool = BlockPool(source=lambda nbytes: np.full(nbytes, 7, np.uint8))
    array = BlockArray(5, np.dtype(np.float32), pool=pool)
    assert array.block(0).array.tolist() == [0.0] * 5
    ones = BlockArray(5, np.dtype(np.float32), 1.0, pool)
    assert ones.block(0).array.tolist() == [1.0] * 5


@pytest.mark.parametrize("version", ["1.26.4", np.__version__])
def test_an_overflow_is_a_result_and_no_warning(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of numpy 1 another way is gone, as its settings belong to threads."""
    monkeypatch.setattr(np, "__version__", version)
    values = np.array([3e38], np.float32)
    with np.errstate(all="raise"):
        Scratch().quietly(np.add, values, values, values)
        assert values.tolist() == [np.inf]
        with pytest.raises(FloatingPointError):
            np.subtract(values, values)


def test_work_space_grows_with_what_is_longer_than_a_chunk() -> None:
    scratch = Scratch(8)
    assert [array.size for array in scratch.arrays(np.dtype("f4"), 2, 4)] == [4, 4]
    assert [array.size for array in scratch.arrays(np.dtype("f4"), 1, 16)] == [16]


class TestPool:
    def test_recycles_what_nobody_sees(self) -> None:
        pool = BlockPool()
        root = pool.take(80 * KIB)
        address = root.ctypes.data
        pool.give(root)
        del root
        assert pool.take(80 * KIB).ctypes.data == address
        assert pool.hits == 1

    def test_never_hands_out_what_somebody_sees(self) -> None:
        pool = BlockPool()
        root = pool.take(80 * KIB)
        address = root.ctypes.data
        pool.give(root)
        view = memoryview(root)[3:5]
        del root
        other = pool.take(80 * KIB)
        assert other.ctypes.data != address
        assert pool.misses == 2
        del view
        assert pool.take(80 * KIB).ctypes.data == address

    def test_giver_itself_counts_as_somebody(self) -> None:
        pool = BlockPool()
        root = pool.take(80 * KIB)
        pool.give(root)
        assert pool.take(80 * KIB) is not root

    def test_giving_twice_does_not_hand_out_twice(self) -> None:
        pool = BlockPool()
        root = pool.take(80 * KIB)
        pool.give(root)
        pool.give(root)
        del root
        first = pool.take(80 * KIB)
        second = pool.take(80 * KIB)
        assert first is not second
        assert pool.statistics()["roots"] == 0

    def test_other_size_is_not_used(self) -> None:
        pool = BlockPool()
        pool.give(pool.take(80 * KIB))
        assert pool.take(90 * KIB).nbytes == 90 * KIB
        assert pool.hits == 0

    def test_finds_a_free_root_behind_held_ones_in_bounded_work(self) -> None:
        pool = BlockPool()
        held = [pool.take(80 * KIB) for _ in range(20)]
        for root in held:
            pool.give(root)
        free = pool.take(80 * KIB)
        address = free.ctypes.data
        pool.give(free)
        del free, root
        taken = [pool.take(80 * KIB) for _ in range(3)]  # each looks at eight
        assert [root.ctypes.data == address for root in taken] == [False, False, True]

    def test_bounded_in_bytes_least_recently_given_first(self) -> None:
        pool = BlockPool(max_bytes=160 * KIB)
        first, second, third = (pool.take(80 * KIB) for _ in range(3))
        addresses = [first.ctypes.data, second.ctypes.data, third.ctypes.data]
        pool.give(first)
        pool.give(second)
        pool.give(first)  # used again: second is now the oldest
        pool.give(third)
        statistics = pool.statistics()
        found = [statistics[name] for name in ("bytes", "roots", "evicted", "max_bytes")]
        assert found == [160 * KIB, 2, 1, 160 * KIB]
        del first, third
        assert {pool.take(80 * KIB).ctypes.data for _ in range(2)} <= {
            addresses[0],
            addresses[2],
        }

    def test_root_larger_than_the_bound_and_tiny_roots_are_not_kept(self) -> None:
        pool = BlockPool(max_bytes=160 * KIB)
        pool.give(np.empty(170 * KIB, np.uint8))
        pool.give(np.empty(64, np.uint8))
        pool.give(pool.take(0))
        assert pool.statistics()["roots"] == 0

    def test_forgets_sizes_that_it_has_no_roots_of(self) -> None:
        pool = BlockPool()
        for extra in range(50):
            pool.give(pool.take(80 * KIB + extra))
        for extra in range(50):
            pool.take(80 * KIB + extra)
        assert not pool._by_size

    def test_refuses_views_and_other_arrays(self) -> None:
        pool = BlockPool()
        with pytest.raises(UsageError, match="only arrays that own their memory, got a view"):
            pool.give(np.empty(80 * KIB, np.uint8)[1:])
        with pytest.raises(UsageError, match="only 1-d uint8 arrays, got 1-d float32"):
            pool.give(np.empty(80 * KIB, np.float32))
        with pytest.raises(UsageError, match="only 1-d uint8 arrays, got 2-d uint8"):
            pool.give(np.empty((80, KIB), np.uint8))

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
            assert pool.statistics()["bytes"] <= 5 * 4096


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

    KEPT = 320 * KIB

    def pool(self, *, may_grow: bool = True) -> BlockPool:
        return BlockPool(self.KEPT, may_grow=lambda: may_grow)

    def use(self, pool: BlockPool, *sizes: int) -> int:
        """Have so much memory lent at one time; return how often it was new."""
        before = pool.misses
        lent = [pool.lend(size) for size in sizes]
        assert len({root.ctypes.data for root in lent}) == len(sizes)
        return pool.misses - before

    @for_each(
        "sizes",
        [
            [640 * KIB],
            [80 * KIB] * 20,
            [480 * KIB, 80 * KIB, 800 * KIB],
        ],
    )
    def test_it_is_new_once(self, sizes: list[int]) -> None:
        pool = self.pool()
        assert [self.use(pool, *sizes) for _ in range(4)] == [len(sizes), 0, 0, 0]
        assert pool.nbytes == pool.statistics()["bytes"] == sum(sizes)
        pool.shrink()
        assert pool.statistics()["bytes"] <= self.KEPT
        assert self.use(pool, *sizes) > 0
        assert self.use(pool, *sizes) == 0

    def test_a_pool_that_may_not_grow_forgets_the_oldest_also_if_it_is_in_use(self) -> None:
        pool = self.pool(may_grow=False)
        assert [self.use(pool, *[80 * KIB] * 20) for _ in range(2)] == [20, 16]
        assert pool.statistics()["bytes"] == self.KEPT

    def test_of_sizes_that_do_not_come_again_no_more_than_the_bound_is_kept(self) -> None:
        pool = self.pool()
        for extra in range(100):
            self.use(pool, 80 * KIB + extra, 70 * KIB + extra)
            assert pool.statistics()["bytes"] <= self.KEPT

    def test_what_is_in_use_does_not_hide_what_nobody_sees(self) -> None:
        pool = self.pool()
        held = [pool.lend(4 * KIB) for _ in range(20)]
        for extra in range(100):
            self.use(pool, 80 * KIB + extra)
        assert pool.statistics()["bytes"] <= len(held) * 70 * KIB + self.KEPT

    @given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=60))
    def test_never_is_it_lent_twice_and_shrunk_it_has_the_bound_or_what_is_in_use(
        self, steps: list[tuple[int, int]]
    ) -> None:
        """So many pages are lent, and the last ones of them kept."""
        pool, live = self.pool(), []
        for pages, kept in steps:
            live.append(pool.lend(pages * 70 * KIB))
            assert len({root.ctypes.data for root in live}) == len(live)
            live = live[len(live) - min(kept, len(live)) :]
        pool.shrink()
        assert pool.statistics()["bytes"] <= max(self.KEPT, sum(root.nbytes for root in live))
