"""Work on one shard: piece by piece, and always to its end."""

from __future__ import annotations

import pytest

from psync.numerics.blocks import BLOCK_ELEMENTS, BlockArray
from psync.specs import ShardSpec, dtype_of
from psync.store.shard import BlockWork, Shard, Work


def shard_of(size: int) -> Shard:
    spec = ShardSpec("w", 0, 0, 0, (size,), "float32", ps=1)
    values = BlockArray(size, dtype_of("float32"), 0)
    return Shard(spec, values, values.nbytes)


@pytest.fixture
def shard() -> Shard:
    """A shard of three blocks."""
    return shard_of(3 * BLOCK_ELEMENTS)


def begun(shard: Shard, done: list[object]) -> Work:
    """Work that notes each block in ``done``, and its end as None."""
    return BlockWork(shard, done.append, lambda: done.append(None))


def test_it_does_a_block_per_step_and_the_last_one_with_its_end(shard: Shard) -> None:
    done: list[object] = []
    work = begun(shard, done)
    assert (done, shard.busy) == ([], True)
    next(work)
    assert done == [0]
    next(work)
    assert (done, shard.busy, shard.version) == ([0, 1], True, 0)
    with pytest.raises(StopIteration):
        next(work)
    assert (done, shard.busy, shard.version) == ([0, 1, 2, None], False, 1)


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_it_is_finished_when_it_is_abandoned(shard: Shard, before: int, close: bool) -> None:
    done: list[object] = []
    work = begun(shard, done)
    for _ in range(before):
        next(work)
    if close:
        work.close()
    del work
    assert (done, shard.busy, shard.version) == ([0, 1, 2, None], False, 1)


def test_it_leaves_the_shard_busy_when_it_fails(shard: Shard) -> None:
    def fail(i: int) -> None:
        raise MemoryError

    work = BlockWork(shard, fail, pytest.fail)
    with pytest.raises(MemoryError):
        next(work)
    assert (shard.busy, shard.version) == (True, 0)


def test_it_is_over_at_once_on_an_empty_shard() -> None:
    shard, ends = shard_of(0), []
    work = BlockWork(shard, pytest.fail, lambda: ends.append(None))
    assert list(work) == []
    assert (ends, shard.version) == ([None], 1)


def test_it_may_have_other_pieces_than_blocks_and_change_nothing(shard: Shard) -> None:
    done: list[int] = []
    for _ in BlockWork(shard, done.append, lambda: None, 5, changes=False):
        pass
    assert (done, shard.busy, shard.version) == ([0, 1, 2, 3, 4], False, 0)
