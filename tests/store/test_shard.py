"""Work on one shard: piece by piece, and always to its end."""

from __future__ import annotations

import pytest

from psync.numerics.memory import BLOCK_ELEMENTS, BlockArray
from psync.specs import ShardSpec, dtype_of
from psync.store.work import Prepared, Shard, ShardWork, Workspace


def shard_of(size: int) -> Shard:
    spec = ShardSpec("w", 0, 0, 0, (size,), "float32", ps=1)
    values = BlockArray(size, dtype_of("float32"), 0)
    return Shard(spec, values, values.nbytes, 1)


def work_on(shard: Shard, done: list[object], alone: int = 0) -> ShardWork:
    """Work that notes each block in ``done``, and its end as None; most can be handed out."""

    def prepared(i: int) -> Prepared:
        return Prepared(lambda space: done.append(f"compute {i}"), lambda: done.append(i))

    count = shard.values.num_blocks
    return ShardWork(
        shard, map(prepared, range(count)), lambda: done.append(None), Workspace(), alone,
        count - alone,
    )  # fmt: skip


def compute(blocks: list[Prepared]) -> int:
    for block in blocks:
        block.compute(Workspace())
    return len(blocks)


def test_blocks_that_are_handed_out_come_back_in_any_order_before_the_end() -> None:
    done: list[object] = []
    shard = shard_of(8 * BLOCK_ELEMENTS)
    work = work_on(shard, done)
    first, second = work.hand_out(2), work.hand_out(2)
    assert not work.hand_out(2)
    assert done == []
    compute(second)
    work.take_back(second)
    next(work)  # nothing is left to be done here
    assert done == [*(f"compute {i}" for i in range(4, 8)), 4, 5, 6, 7]
    compute(first)
    work.take_back(first)
    assert shard.busy
    with pytest.raises(StopIteration):
        next(work)
    assert (done[-1], shard.busy) == (None, False)


@pytest.mark.parametrize(
    ("blocks", "threads", "sizes"),
    [(7, 2, []), (8, 2, [4, 4]), (9, 2, [5, 4]), (64, 2, [16] * 4), (7, 4, []), (8, 4, [4] * 2)],
)
def test_what_is_handed_out_is_divided_among_threads(
    blocks: int, threads: int, sizes: list[int]
) -> None:
    done: list[object] = []
    work = work_on(shard_of(blocks * BLOCK_ELEMENTS), done)
    found = []
    while out := work.hand_out(threads):
        found.append(compute(out))
        work.take_back(out)
    assert found == sizes
    work.close()
    assert [i for i in done if isinstance(i, int)] == list(range(blocks))


def test_blocks_that_cannot_be_handed_out_are_done_first() -> None:
    done: list[object] = []
    work = work_on(shard_of(11 * BLOCK_ELEMENTS), done, alone=3)
    for i in range(3):
        assert not work.hand_out(2)
        next(work)
        assert done[-1] == i
    out = work.hand_out(2)
    compute(out)
    work.take_back(out)
    assert done[-4:] == [3, 4, 5, 6]
