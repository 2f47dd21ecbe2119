"""Work on one shard: piece by piece, and always to its end."""

from __future__ import annotations

import pytest

from psync.numerics.memory import BLOCK_ELEMENTS, BlockArray
from psync.specs import ShardSpec, dtype_of
from psync.store.work import BlockWork, Prepared, Shard, Work, Workspace


def shard_of(size: int) -> Shard:
    spec = ShardSpec("w", 0, 0, 0, (size,), "float32", ps=1)
    values = BlockArray(size, dtype_of("float32"), 0)
    return Shard(spec, values, values.nbytes, 1)


@pytest.fixture
def shard() -> Shard:
    """A shard of three blocks."""
    return shard_of(3 * BLOCK_ELEMENTS)


def begun(shard: Shard, done: list[object]) -> Work:
    """Work that notes each block in ``done``, and its end as None."""
    return BlockWork(shard, done.append, lambda: done.append(None))


def handed_out_of(shard: Shard, done: list[object]) -> BlockWork:
    """As ``begun``, and any block can be handed out."""

    def prepared(i: int) -> Prepared:
        return Prepared(lambda space: done.append(f"compute {i}"), lambda: done.append(i))

    return BlockWork(shard, done.append, lambda: done.append(None), prepared=prepared)


def test_blocks_that_are_handed_out_come_back_in_any_order_before_the_end() -> None:
    done: list[object] = []
    shard, space = shard_of(8 * BLOCK_ELEMENTS), Workspace()
    work = handed_out_of(shard, done)
    first, second = work.hand_out(2), work.hand_out(2)
    assert first is not None
    assert second is not None
    assert work.hand_out(2) is None
    assert done == []
    second.compute(space)
    second.commit()
    next(work)  # nothing is left to be done here
    assert done == [*(f"compute {i}" for i in range(4, 8)), 4, 5, 6, 7]
    first.compute(space)
    first.commit()
    assert (shard.busy, shard.version) == (True, 0)
    with pytest.raises(StopIteration):
        next(work)
    assert (done[-1], shard.busy, shard.version) == (None, False, 1)


@pytest.mark.parametrize(
    ("blocks", "threads", "sizes"),
    [(7, 2, []), (8, 2, [4, 4]), (9, 2, [5, 4]), (64, 2, [16] * 4), (7, 4, []), (8, 4, [4] * 2)],
)
def test_what_is_handed_out_is_divided_among_threads(
    blocks: int, threads: int, sizes: list[int]
) -> None:
    done: list[object] = []
    work = handed_out_of(shard_of(blocks * BLOCK_ELEMENTS), done)
    found = []
    while (out := work.hand_out(threads)) is not None:
        before = len(done)
        out.compute(Workspace())
        found.append(len(done) - before)
        out.commit()
    assert found == sizes
    work.close()
    assert [i for i in done if isinstance(i, int)] == list(range(blocks))


def test_blocks_that_cannot_be_handed_out_are_done_first() -> None:
    done: list[object] = []
    shard = shard_of(11 * BLOCK_ELEMENTS)

    def prepared(i: int) -> Prepared | None:
        return Prepared(lambda _: None, lambda: done.append(i)) if i >= 3 else None

    work = BlockWork(shard, lambda i: done.append(f"here {i}"), lambda: None, prepared=prepared)
    for i in range(3):
        assert work.hand_out(2) is None
        next(work)
        assert done[-1] == f"here {i}"
    out = work.hand_out(2)
    assert out is not None
    out.compute(Workspace())
    out.commit()
    assert done[3:] == [3, 4, 5, 6]
