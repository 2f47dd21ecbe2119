"""Rows by their numbers: merged, scattered, in blocks that lie side by side; sparse gradients."""

from __future__ import annotations

import gc
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops import for_each
from psync.errors import UsageError, ValueMismatchError
from psync.numerics import memory
from psync.numerics.memory import BlockArray, BlockPool
from psync.numerics.rows import (
    LONG_RUN,
    SCATTER_OPS,
    IndexedSlices,
    RowBlocks,
    check_scatter,
    combine,
    distinct,
    in_order,
    merged,
)
from psync.specs import DTYPE_NAMES, dtype_of


def one_by_one(array: np.ndarray, rows: list[int], values: np.ndarray, op: str) -> np.ndarray:
    """What a loop over the rows would do."""
    made = array.copy()
    for row, value in zip(rows, values, strict=True):
        combine(op, made[row], value)
    return made


@given(
    st.lists(st.integers(0, 5), max_size=40),
    st.sampled_from(SCATTER_OPS),
    st.sampled_from(["int8", "uint16", "int64", "float64"]),
)
def test_merged_rows_change_an_array_as_all_of_them_do(
    rows: list[int], op: str, dtype: str
) -> None:
    if op == "div" and dtype != "float64":
        return
    rng = np.random.default_rng(len(rows))
    # Powers of two: products and quotients of floats are exact. Integers wrap around.
    values = (2 ** rng.integers(0, 4, (len(rows), 2))).astype(dtype)
    array = rng.integers(0, 100, (6, 2)).astype(dtype)
    expected = one_by_one(array, rows, values, op)
    each, made = merged(np.array(rows, np.int64), values, op)
    assert each.tolist() == sorted(set(rows))
    assert made.dtype == values.dtype
    got = array.copy()
    current = got[each]
    combine(op, current, made)
    got[each] = current
    np.testing.assert_array_equal(got, expected)


def test_what_is_in_order_is_returned_as_it_is() -> None:
    rows, values = np.array([2, 5]), np.ones((2, 3))
    assert all(a is b for a, b in zip(merged(rows, values, "add"), (rows, values), strict=True))


@for_each("dtype", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype: str) -> None:
    count = 4 * LONG_RUN
    values = np.full((count, 1), 0.1).astype(dtype_of(dtype))
    rows, made = merged(np.zeros(count, np.int64), values, "add")
    expected = np.float32(values[0, 0]) * count
    assert rows.tolist() == [0]
    assert made.dtype == values.dtype
    assert made[0, 0] == np.float32(expected).astype(values.dtype)


def test_memory_of_the_result_is_what_the_caller_makes() -> None:
    made: list[np.ndarray] = []

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[-1]

    for rows in ([3, 1], [1, 1]):
        for op in ("add", "assign"):
            _, values = merged(np.array(rows), np.ones((2, 2)), op, empty)
            assert values is made[-1]


def test_an_overflow_is_a_result() -> None:
    current = np.full(1, 3e38, np.float32)
    combine("add", current, current.copy())
    assert np.isinf(current)
    _, values = merged(np.zeros(2, np.int64), np.full((2, 1), 3e38, np.float32), "add")
    assert np.isinf(values)


def test_the_smaller_of_a_number_and_nan_is_nan() -> None:
    current = np.array([1.0, np.nan])
    combine("min", current, np.array([np.nan, 1.0]))
    assert np.isnan(current).all()


@for_each("dtype", DTYPE_NAMES)
@for_each("op", SCATTER_OPS)
def test_which_dtypes_an_operation_has(op: str, dtype: str) -> None:
    refused = (dtype == "bool" and op != "assign") or ("int" in dtype and op == "div")
    if not refused:
        check_scatter(op, dtype, '"v"')
        return
    with pytest.raises(ValueMismatchError, match=r'"v": (bool|u?int\d+) values can'):
        check_scatter(op, dtype, '"v"')


def test_an_unknown_operation_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="unknown operation 'pow'\nhint: use one of add, sub"):
        check_scatter("pow", "float32", '"v"')


FAR = 1 << 62  # beyond what can be packed with a position

numbers = st.lists(st.integers(0, 9) | st.integers(0, 2**40) | st.integers(FAR, 2**63 - 1))


def rows_of(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@given(numbers, st.booleans())
def test_each_row_is_there_once_and_is_found_again(values: list[int], sort: bool) -> None:
    each, inverse = distinct(rows_of(values), sort=sort)
    if inverse is None:
        assert each.tolist() == values == (sorted(set(values)) if sort else values)
        assert len(set(values)) == len(values)
    else:
        assert each.tolist() == sorted(set(values))
        assert each[inverse].tolist() == values
        assert sort or len(set(values)) < len(values)


@given(numbers)
def test_rows_are_put_in_order_and_equal_ones_stay_in_theirs(values: list[int]) -> None:
    ordered, order = in_order(rows_of(values))
    expected = sorted(range(len(values)), key=values.__getitem__)
    assert (ordered.tolist(), order.tolist()) == (sorted(values), expected)


def test_a_gradient_has_each_row_once_and_its_half_precision_is_rounded_once() -> None:
    values = np.array([2048.0, 7.0, 1.0, 1.0], np.float16)  # 2048 + 1 is 2048 in float16
    indices, merged = IndexedSlices(values, np.array([5, 2, 5, 5], np.int32)).merged()
    assert (indices.tolist(), merged.tolist()) == ([2, 5], [7.0, 2050.0])
    assert merged.dtype == np.float16


def test_what_needs_no_change_is_not_copied() -> None:
    values = np.ones((2, 3), np.float32)
    _, merged = IndexedSlices(values, np.array([1, 7])).merged()
    assert merged is values


def test_a_list_without_rows_is_a_gradient_too() -> None:
    slices = IndexedSlices(np.zeros((0, 4), np.float32), [])
    indices, values = slices.merged()
    assert indices.dtype == np.int64
    assert values.shape == (0, 4)


@for_each(
    "values, indices",
    [
        (np.zeros((2, 3)), [0]),
        (np.zeros((2, 3)), [[0, 1]]),
        (np.zeros((2, 3)), [0.5, 1.0]),
        (np.float32(1), [0]),
        ([[1], [2, 3]], [0, 1]),
        ([1, 2], [[0], [1, 2]]),
    ],
)
def test_what_does_not_belong_together_is_refused(values: object, indices: object) -> None:
    with pytest.raises(ValueMismatchError, match="IndexedSlices: expected"):
        IndexedSlices(values, indices)


def test_integers_named_twice_are_refused_since_nobody_can_train_with_them() -> None:
    with pytest.raises(ValueMismatchError, match="floating-point"):
        IndexedSlices(np.array([1, 2]), [0, 0]).merged()


def test_what_it_is_can_be_read() -> None:
    slices = IndexedSlices(np.zeros((2, 3), np.float32), [1, 1], (10, 3))
    assert repr(slices) == "IndexedSlices(2 rows of shape (3,) float32, dense_shape=(10, 3))"


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


@for_each("dtype", DTYPE_NAMES)
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
    assert array.seen
    assert array.held_among(np.array([0, 1])) == [0]
    del seen_first
    assert array.held_among(np.array([0, 1])) == []
    assert not array.seen


@for_each("how", ["row", "all of it"])
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


@for_each("row_size", [3, 11, 20])
@for_each("held", [0, 1, 2])
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


@for_each("row_size", [0, 1, 2, 3, 8, 11, 20, 40])
def test_in_which_blocks_rows_lie(row_size: int) -> None:
    array = RowBlocks(20, row_size, np.dtype(np.int32))
    for rows in ([], [0], [19], [3, 4, 11], list(range(20))):
        expected = sorted({(row * row_size + i) // 8 for row in rows for i in range(row_size)})
        assert array.blocks_of(np.array(rows, np.int64)).tolist() == expected


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


def test_rows_may_be_empty_or_none() -> None:
    for num_rows, row_size in ((0, 4), (3, 0)):
        array = RowBlocks(num_rows, row_size, np.dtype(np.float32), 1)
        rows = np.arange(num_rows)
        assert array.blocks_of(rows).tolist() == []
        write(array, rows, np.empty((num_rows, row_size), np.float32), BlockPool())
        assert gathered(array, rows).shape == (num_rows, row_size)
        assert array.export() == []


@for_each("row_size", [1, 3, 4, 20])
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
