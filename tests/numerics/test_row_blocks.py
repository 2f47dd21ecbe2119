from __future__ import annotations

import gc
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psync.numerics import memory
from psync.numerics.memory import BlockArray, BlockPool
from psync.numerics.rows import RowBlocks
from psync.specs import DTYPE_NAMES, dtype_of

NUM_ROWS = 12


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of eight elements: some rows lie in two of them, or in four."""
    monkeypatch.setattr(memory, "BLOCK_ELEMENTS", 8)


def value_of(array: BlockArray) -> np.ndarray:
    return np.frombuffer(b"".join(array.export()), array.dtype)


def gathered(array: RowBlocks, rows: np.ndarray) -> np.ndarray:
    out = np.empty((len(rows), array.row_size), array.dtype)
    array.gather(rows, out, BlockPool())
    return out


def write(array: RowBlocks, rows: np.ndarray, values: np.ndarray, pool: BlockPool) -> int:
    """As a store does; returns how many blocks were copied."""
    copies = sum(array.free(i, pool) for i in array.held_among(array.blocks_of(rows)))
    array.scatter(rows, values)
    return copies


def assign(array: RowBlocks, value: np.ndarray, pool: BlockPool) -> None:
    """Update all of it, block by block."""
    for i in range(array.num_blocks):
        start, stop = array.bounds(i)
        target = array.writable(i, pool)
        target.array[:] = value[start:stop]
        array.commit(i, target, pool)


action = st.tuples(
    st.sampled_from(["gather", "write", "assign", "export", "drop"]),
    st.sets(st.integers(0, NUM_ROWS - 1)),
)


@settings(deadline=None)
@given(st.sampled_from([1, 3, 4, 8, 20]), st.sampled_from([0, 7]), st.lists(action, max_size=20))
def test_it_is_an_array_whatever_is_done_and_what_was_seen_never_changes(
    row_size: int, fill: int, actions: list[tuple[str, set[int]]]
) -> None:
    memory.BLOCK_ELEMENTS = 8
    pool = BlockPool()
    array = RowBlocks(NUM_ROWS, row_size, np.dtype(np.int32), fill)
    model = np.full((NUM_ROWS, row_size), fill, np.int32)
    exports: list[tuple[list[memoryview], bytes]] = []
    for number, (what, chosen) in enumerate(actions):
        rows = np.array(sorted(chosen), np.int64)
        if what == "gather":
            np.testing.assert_array_equal(gathered(array, rows[::-1]), model[rows[::-1]])
        elif what == "write":
            values = np.full((len(rows), row_size), 100 + number, np.int32)
            values += np.arange(row_size, dtype=np.int32)
            model[rows] = values
            write(array, rows, values, pool)
        elif what == "assign":
            model[...] = np.arange(model.size).reshape(model.shape) + number
            assign(array, model.reshape(-1), pool)
        elif what == "export":
            first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, NUM_ROWS)
            views = array.export(first * row_size, last * row_size)
            exports.append((views, model[first:last].tobytes()))
        elif exports:
            exports.pop(0)
        for views, expected in exports:
            assert b"".join(views) == expected
    everything = np.arange(NUM_ROWS)
    np.testing.assert_array_equal(gathered(array, everything), model)
    np.testing.assert_array_equal(value_of(array), model.reshape(-1))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_rows_of_every_dtype_are_written_and_read(dtype: str) -> None:
    array = RowBlocks(5, 3, dtype_of(dtype))
    values = np.ones((2, 3), dtype_of(dtype))
    write(array, np.array([1, 4]), values, BlockPool())
    expected = np.zeros((5, 3), dtype_of(dtype))
    expected[[1, 4]] = 1
    assert (gathered(array, np.arange(5)) == expected).all()


def test_what_nobody_sees_is_written_where_it_is() -> None:
    array, pool = RowBlocks(4, 8, np.dtype(np.float32)), BlockPool()
    row = np.array([1])
    write(array, np.array([0]), np.ones((1, 8), np.float32), pool)
    seen_first = array.export(0, 8)  # another block
    assert write(array, row, np.ones((1, 8), np.float32), pool) == 0
    seen = array.export(8, 16)
    assert write(array, row, np.full((1, 8), 2, np.float32), pool) == 1
    assert write(array, row, np.full((1, 8), 3, np.float32), pool) == 0  # lies elsewhere now
    assert np.frombuffer(b"".join(seen), np.float32).tolist() == [1] * 8
    del seen
    gc.collect()
    assert gathered(array, row).tolist() == [[3] * 8]  # and is back home
    assert array.any_seen
    assert array.held_among(np.array([0, 1])) == [0]
    del seen_first
    assert array.held_among(np.array([0, 1])) == []
    assert not array.any_seen


def test_a_block_that_is_seen_away_from_home_is_copied_again() -> None:
    array, pool = RowBlocks(1, 8, np.dtype(np.float32)), BlockPool()
    row, held = np.array([0]), []
    for value in range(1, 4):
        assert write(array, row, np.full((1, 8), value, np.float32), pool) == (value > 1)
        held.append(array.export())
    assert [np.frombuffer(b"".join(views), np.float32)[0] for views in held] == [1, 2, 3]


@pytest.mark.parametrize("how", ["row", "all of it"])
def test_a_block_comes_home_when_it_is_updated_and_nobody_holds_its_home(how: str) -> None:
    array, pool = RowBlocks(2, 8, np.dtype(np.float32)), BlockPool()
    row, both = np.array([1]), np.arange(2)
    write(array, both, np.ones((2, 8), np.float32), pool)
    seen = array.export()
    assert write(array, row, np.full((1, 8), 2, np.float32), pool) == 1
    del seen
    if how == "row":
        assert write(array, row, np.full((1, 8), 3, np.float32), pool) == 1
        expected = [1, 3]
    else:
        assign(array, np.full(16, 3, np.float32), pool)
        expected = [3, 3]
    assert not array._away
    assert gathered(array, both)[:, 0].tolist() == expected


@pytest.mark.parametrize("row_size", [3, 11, 20])
@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_row_of_which_a_part_is_away_is_read_and_written_in_both_places(
    row_size: int, held: int
) -> None:
    array, pool = RowBlocks(6, row_size, np.dtype(np.int32)), BlockPool()
    model = np.arange(6 * row_size, dtype=np.int32).reshape(6, row_size)
    everything = np.arange(6)
    write(array, everything, model, pool)
    start, stop = array.bounds(held)
    seen, before = array.export(start, stop), model.reshape(-1)[start:stop].tobytes()
    for number in range(2):
        model += 100
        write(array, everything, model, pool)
        np.testing.assert_array_equal(gathered(array, everything[::-1]), model[::-1])
        np.testing.assert_array_equal(gathered(array, everything[:2]), model[:2])
        assert b"".join(seen) == before, number
    del seen
    np.testing.assert_array_equal(gathered(array, everything), model)
    np.testing.assert_array_equal(value_of(array), model.reshape(-1))


def test_a_table_that_will_be_full_may_have_large_pages() -> None:
    array = RowBlocks(1 << 12, 8, np.dtype(np.float32), dense=True)
    write(array, np.array([5]), np.ones((1, 8), np.float32), BlockPool())
    assert gathered(array, np.array([5, 6]))[:, 0].tolist() == [1, 0]


@pytest.mark.parametrize("row_size", [0, 2, 8, 3])
def test_how_many_blocks_rows_lie_in(row_size: int) -> None:
    array = RowBlocks(20, row_size, np.dtype(np.int32))
    for rows in ([], [0], [3, 4, 11], list(range(20))):
        expected = len({(row * row_size + i) // 8 for row in rows for i in range(row_size)})
        assert array.num_blocks_of(np.array(rows, np.int64)) == expected


def test_rows_that_were_never_written_are_not_looked_at() -> None:
    """So reading takes no memory; here that memory would show by what is in it."""
    array = RowBlocks(6, 2, np.dtype(np.float32), 0.5)
    array._table[...] = 99
    array.scatter(np.array([2]), np.ones((1, 2), np.float32))
    assert gathered(array, np.array([0, 2, 5]))[:, 0].tolist() == [0.5, 1, 0.5]
    assert gathered(array, np.array([0, 5]))[:, 0].tolist() == [0.5, 0.5]
    assert value_of(array).tolist() == [0.5] * 4 + [1, 1] + [0.5] * 6


def test_a_table_of_terabytes_takes_the_memory_of_the_rows_that_are_used() -> None:
    memory.BLOCK_ELEMENTS = 1 << 18
    rows = 1 << 26  # of 4 KiB: 256 GiB
    array = RowBlocks(rows, 1024, np.dtype(np.float32), 1.0)
    chosen = np.array([0, rows // 2, rows - 1])
    before = resident()
    write(array, chosen, np.full((3, 1024), 7, np.float32), BlockPool())
    assert gathered(array, np.array([rows - 1, 5]))[:, 0].tolist() == [7, 1]
    assert resident() - before < 8 << 20


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def test_blocks_of_another_array_are_taken_over() -> None:
    for made in ([0], [1], [0, 1], [1, 3], [0, 1, 2, 3]):
        pool = BlockPool()
        array = BlockArray(30, np.dtype(np.int32), 5)
        model = np.full(30, 5, np.int32)
        for i in made:
            start, stop = array.bounds(i)
            array.block(i).array[:] = model[start:stop] = np.arange(start, stop)
        laid_out = RowBlocks(10, 3, array.dtype, array.fill)
        for i in range(array.num_blocks):
            block = array.release(i)
            if block is not None:
                laid_out.take_over(i, block)
        laid_out.taken_over()
        np.testing.assert_array_equal(gathered(laid_out, np.arange(10)), model.reshape(10, 3))
        np.testing.assert_array_equal(value_of(laid_out), model)
        write(laid_out, np.array([9]), np.zeros((1, 3), np.int32), pool)
        model[27:] = 0
        np.testing.assert_array_equal(value_of(laid_out), model)


@pytest.mark.parametrize("row_size", [1, 2, 3, 8, 11, 20, 40])
def test_in_which_blocks_rows_lie(row_size: int) -> None:
    array = RowBlocks(9, row_size, np.dtype(np.int32))
    for rows in ([], [0], [8], [1, 2], [0, 4, 8], list(range(9))):
        elements = [row * row_size + i for row in rows for i in range(row_size)]
        expected = sorted({element // 8 for element in elements})
        assert array.blocks_of(np.array(rows, np.int64)).tolist() == expected


def test_rows_may_be_empty_or_none() -> None:
    for num_rows, row_size in ((0, 4), (3, 0)):
        array = RowBlocks(num_rows, row_size, np.dtype(np.float32), 1)
        rows = np.arange(num_rows)
        assert array.blocks_of(rows).tolist() == []
        write(array, rows, np.empty((num_rows, row_size), np.float32), BlockPool())
        assert gathered(array, rows).shape == (num_rows, row_size)
        assert array.export() == []


@pytest.mark.parametrize("row_size", [1, 3, 4, 20])
def test_blocks_that_were_written_in_part_are_written_out(row_size: int) -> None:
    array = RowBlocks(NUM_ROWS, row_size, np.dtype(np.float32), 7)
    expected = np.full((NUM_ROWS, row_size), 7, np.float32)
    assert array.is_constant
    assert not any(array.settle(i) for i in range(array.num_blocks))
    expected[4] = 0
    write(array, np.array([4]), expected[4:5], BlockPool())
    assert not array.is_constant
    assert any([array.settle(i) for i in range(array.num_blocks)])
    while any(array.settle(i) for i in range(array.num_blocks)):
        assert row_size == 3, "rows that lie in two blocks lead to the next one"
    assert np.array_equal(value_of(array), expected.reshape(-1))
    write(array, np.arange(NUM_ROWS), expected, BlockPool())
    array.taken_over()  # whoever has laid it out says so
    assert not any(array.settle(i) for i in range(array.num_blocks))
