from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_arrays import array_of
from psync.numerics.memory import BLOCK_BYTES, Block, BlockArray, BlockPool, bytes_of
from psync.specs import DTYPE_NAMES, dtype_of

F32 = np.dtype(np.float32)
KIB = 1024


def joined(array: BlockArray, start: int = 0, stop: int | None = None) -> np.ndarray:
    return np.frombuffer(b"".join(array.export(start, stop)), array.dtype)


@pytest.mark.parametrize("name", DTYPE_NAMES)
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
    @pytest.mark.parametrize("size", [0, 1, 262143, 262144, 262145, 600_000])
    def test_round_trip_over_block_boundaries(self, size: int) -> None:
        values = np.arange(size, dtype=np.float32)
        array = array_of(values)
        assert array.num_blocks == -(-size * 4 // BLOCK_BYTES)
        assert array.nbytes == size * 4
        assert np.array_equal(joined(array), values)

    @pytest.mark.parametrize("name", DTYPE_NAMES)
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

    @pytest.mark.parametrize("fill", [0, 0.1, 1])
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

    @pytest.mark.parametrize(
        ("dtype", "fill"),
        [("float32", -0.0), ("float64", np.nan), ("int64", 2**63 - 1), ("uint64", 2**64 - 1),
         ("bool", True)],
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
        assert pool.statistics().misses == 1  # the second update worked in place
        del snapshot
        gc.collect()
        _second = array.export()
        array.writable(0, pool)
        assert pool.statistics().hits == 1

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
