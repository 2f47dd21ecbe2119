from __future__ import annotations

import numpy as np

from block_arrays import array_of
from psync.numerics.memory import BlockArray, BlockPool
from psync.store.store import Adjacent, CommonBlock

FLOAT = np.dtype(np.float32)


def arrays(pool: BlockPool, *sizes: int) -> list[BlockArray]:
    """Arrays of 1s, 2s, …"""
    return [array_of(np.full(size, n, FLOAT), pool) for n, size in enumerate(sizes, 1)]


def in_common(pool: BlockPool, *sizes: int) -> tuple[CommonBlock, list[BlockArray]]:
    made = arrays(pool, *sizes)
    return CommonBlock(made, pool.take(4 * sum(sizes)), pool), made


def values(array: BlockArray) -> list[float]:
    return np.frombuffer(b"".join(array.export()), FLOAT).tolist()  # type: ignore[no-any-return]


def test_arrays_keep_what_they_hold_and_lie_side_by_side() -> None:
    common, (first, second) = in_common(BlockPool(), 3, 2)
    assert common.block.array.tolist() == [1, 1, 1, 2, 2]
    assert (values(first), values(second)) == ([1, 1, 1], [2, 2])
    assert bytes(common.export(2, 4)) == np.array([1, 2], FLOAT).tobytes()
    assert bytes(second.export(1)[0]) == np.array([2], FLOAT).tobytes()


def test_an_array_that_was_never_written_begins_with_its_fill() -> None:
    pool = BlockPool()
    unmade = BlockArray(2, FLOAT, 7, pool)
    common = CommonBlock([unmade, *arrays(pool, 1)], pool.take(12), pool)
    assert common.block.array.tolist() == [7, 7, 1]


def test_all_arrays_have_what_replaces_the_common_block() -> None:
    pool = BlockPool()
    common, each = in_common(pool, 3, 2)
    held = each[0].export()
    block = common.writable(pool)
    block.array[:] = 9
    assert values(each[1]) == [2, 2]
    assert common.commit(block, pool)
    assert [values(array) for array in each] == [[9] * 3, [9] * 2]
    assert bytes(held[0]) == np.ones(3, FLOAT).tobytes()
    assert not common.block.held()
    assert not common.commit(common.writable(pool), pool), "nobody sees it: in place"


def test_a_view_of_one_array_keeps_all_from_being_changed() -> None:
    pool = BlockPool()
    common, (first, second) = in_common(pool, 3, 2)
    assert first.writable(0, pool) is first.block(0)
    held = second.export()
    assert common.block.held()
    apart = first.writable(0, pool)
    assert apart is not first.block(0)
    apart.array[:] = 5
    assert not common.is_left
    assert first.commit(0, apart, pool)
    assert common.is_left
    assert (values(first), values(second), common.block.array.tolist()) == (
        [5] * 3, [2] * 2, [1, 1, 1, 2, 2],
    )  # fmt: skip
    del held
    assert second.writable(0, pool) is second.block(0)


def test_adjacent_arrays_are_an_array_of_arrays_and_one() -> None:
    whole = np.arange(6)
    parts = Adjacent(whole, [slice(0, 1), slice(1, 4), slice(4, 6)])
    assert [part.tolist() for part in parts] == [[0], [1, 2, 3], [4, 5]]
    assert (len(parts), parts[1].tolist()) == (3, [1, 2, 3])
    assert parts.between(1, 3).tolist() == [1, 2, 3, 4, 5]
    assert [part.tolist() for part in parts[1:]] == [[1, 2, 3], [4, 5]]
    assert parts[1:].between(0, 1).tolist() == [1, 2, 3]
    assert np.shares_memory(parts[0], whole)
