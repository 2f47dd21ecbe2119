from __future__ import annotations

import asyncio
from collections.abc import Generator

import numpy as np
import pytest

from psync.errors import PsyncError
from psync.ps.cooperative_work import INLINE_BYTES, LongWork
from psync.specs import ShardSpec
from psync.store.store import Key, ShardStore, Work

TASK = "/job:ps/task:0"


class Ps:
    """A store with shards of one element each, and the work on it."""

    def __init__(self, shards: int = 1) -> None:
        self.ended: list[str] = []
        self.work = LongWork(TASK, lambda: self.ended.append("torn"))
        self.store = ShardStore(TASK)
        self.keys: list[Key] = [(number, 0) for number in range(shards)]
        for number, _ in self.keys:
            self.store.create(ShardSpec(f"v{number}", number, 0, 0, (), "float32", 0))

    def add_one(self, position: int) -> Work:
        return self.store.assign(self.keys[position], "add", np.ones((), np.float32))

    def value(self, position: int) -> float:
        (block,) = self.store.read(self.keys[position])
        return float(np.asarray(block).view(np.float32)[0])


def broken() -> Generator[None, None, None]:
    yield
    raise MemoryError


async def test_work_goes_on_when_its_request_is_cancelled() -> None:
    ps = Ps()
    gate = asyncio.Event()

    async def update() -> None:
        await gate.wait()
        ps.work.finish_now(ps.add_one(0))

    request = asyncio.ensure_future(ps.work.to_the_end(update()))
    await asyncio.sleep(0)
    request.cancel()
    await asyncio.wait([request])
    gate.set()
    await ps.work.drain()
    assert ps.value(0) == 1


async def test_what_work_begins_at_its_end_is_waited_for_too() -> None:
    """Else a new coordinator takes the shards away from computes that wait behind others."""
    ps = Ps()
    gate = asyncio.Event()

    async def update(further: int) -> None:
        await gate.wait()
        for _ in range(3):  # it is large
            await asyncio.sleep(0)
        ps.work.finish_now(ps.add_one(0))
        if further:
            ps.work.to_the_end(update(further - 1))

    ps.work.to_the_end(update(2))
    draining = asyncio.ensure_future(ps.work.drain())
    await asyncio.sleep(0)
    gate.set()
    await draining
    assert ps.value(0) == 3


def test_what_is_small_and_idle_fits_into_this_turn() -> None:
    ps = Ps(2)
    assert ps.work.fits_now(ps.store, ps.keys, 8)
    assert not ps.work.fits_now(ps.store, ps.keys, INLINE_BYTES)
    assert not ps.work.fits_now(ps.store, ps.keys * 100, 8)  # many shards cost time, too
    work = ps.add_one(1)
    assert not ps.work.fits_now(ps.store, ps.keys, 8)
    ps.work.finish_now(work)


async def test_a_busy_shard_is_waited_for_and_those_before_it_are_done_meanwhile() -> None:
    ps = Ps(3)
    other = ps.add_one(1)
    updating = asyncio.ensure_future(ps.work.shard_by_shard([4, 4, 4], ps.add_one))
    await asyncio.sleep(0)
    assert ps.value(0) == 1
    assert ps.value(2) == 0
    await ps.work.finish(other)
    await updating
    assert [ps.value(position) for position in range(3)] == [1, 2, 1]


async def test_the_loop_runs_between_shards_that_together_are_large() -> None:
    ps = Ps(4)
    cost = INLINE_BYTES // 2
    updating = asyncio.ensure_future(ps.work.shard_by_shard([cost] * 4, ps.add_one))
    await asyncio.sleep(0)
    assert not updating.done()
    assert ps.value(3) == 0
    await updating


async def test_who_waits_when_an_update_fails_half_way_is_told_that_the_task_ends() -> None:
    ps = Ps()
    waiting = asyncio.ensure_future(ps.work.next_turn())
    await asyncio.sleep(0)
    with pytest.raises(MemoryError):
        ps.work.finish_now(broken())
    with pytest.raises(PsyncError, match="failed half-way"):
        await waiting
    with pytest.raises(PsyncError, match="failed half-way"):
        await ps.work.next_turn()
    assert ps.work.is_torn
    assert ps.ended == ["torn"]


async def test_work_that_fails_between_two_turns_ends_the_task() -> None:
    ps = Ps()
    with pytest.raises(MemoryError):
        await ps.work.finish(broken())
    assert ps.ended == ["torn"]
