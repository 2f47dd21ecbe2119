from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pytest

from psync.errors import BusyError, PsyncError
from psync.numerics import memory, rules
from psync.numerics.rules import Adam, Lamb
from psync.ps import cooperative_work
from psync.ps.cooperative_work import INLINE_BYTES, LongWork
from psync.specs import ShardSpec
from psync.store.shard import MIN_HANDED_OUT
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


@pytest.mark.promise("updates.started-is-finished")
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
    with pytest.raises(PsyncError, match="failed partway"):
        await waiting
    with pytest.raises(PsyncError, match="failed partway"):
        await ps.work.next_turn()
    assert ps.work.is_torn
    assert ps.ended == ["torn"]


@pytest.mark.promise("updates.never-half-served")
async def test_work_that_fails_between_two_turns_ends_the_task() -> None:
    ps = Ps()
    with pytest.raises(MemoryError):
        await ps.work.finish(broken())
    assert ps.ended == ["torn"]


# In threads.

BLOCK = 1 << 16  # bytes
SIZE = 8 * BLOCK // 4 - 7
LARGE: Key = (7, 0)
OTHER: Key = (8, 0)


@pytest.fixture(params=[1, 2, 4], ids=["one core", "two cores", "four cores"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many cores the ps may use."""
    count: int = request.param
    monkeypatch.setattr(cooperative_work, "usable_cores", lambda: count)
    return count


@pytest.fixture
def ps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ps]:
    """One whose shards LARGE and OTHER have eight blocks, small ones."""
    monkeypatch.setattr(memory, "BLOCK_BYTES", BLOCK)
    made = Ps()
    for name, key in (("large", LARGE), ("other", OTHER)):
        made.store.create(ShardSpec(name, *key, 0, (SIZE,), "float32", 0), fill=np.float32(0.5))
    yield made
    made.work.close()


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def bits(ps: Ps) -> bytes:
    return b"".join(ps.store.read(LARGE))


def updates() -> Iterator[Callable[[ShardStore], Work]]:
    """Pushes, two of which are accumulated; the mean of two; an assign and a moving average."""
    options = rules.RuleOptions(gradient_accumulation_steps=2)
    made = [Adam(0.1), Lamb(0.1), Adam(0.1).with_options(options)]

    def push(store: ShardStore, number: int, seed: int) -> Work:
        store.define_optimizer(number, made[number].to_config())
        return store.apply(number, LARGE, gradient(seed), store.begin_push(number, 0))

    def mean(store: ShardStore) -> Work:
        pair = [gradient(2), gradient(3)]
        return store.apply_mean(0, LARGE, pair, [1, 2], store.begin_push(0, 0), scale=0.5)

    for number in range(len(made)):
        for seed in range(2):
            yield functools.partial(push, number=number, seed=seed)
    yield mean
    yield lambda store: store.assign(LARGE, "add", gradient(4))
    yield lambda store: store.average(LARGE, OTHER, 0.9)


async def test_updates_have_the_same_bits_whoever_computes_them(ps: Ps, cores: int) -> None:
    alone = Ps().store
    for key in (LARGE, OTHER):
        alone.create(ps.store.spec(key), fill=np.float32(0.5))
    for begin in updates():
        held = ps.store.read(LARGE)  # so that blocks are replaced
        before = b"".join(held)
        await ps.work.finish(begin(ps.store))
        for _ in begin(alone):
            pass
        assert b"".join(held) == before
        assert bits(ps) == b"".join(alone.read(LARGE))


def watched(monkeypatch: pytest.MonkeyPatch, seen: Callable[[], None]) -> None:
    """Let ``seen`` be called, by who computes it, before each block of SGD."""
    usual = rules.SGD.apply

    def apply(self: rules.SGD, *args: Any) -> None:
        seen()
        usual(self, *args)

    monkeypatch.setattr(rules.SGD, "apply", apply)


def sgd(ps: Ps) -> Work:
    ps.store.define_optimizer(1, rules.SGD(1.0).to_config())
    return ps.store.apply(1, LARGE, np.ones(SIZE, np.float32), ps.store.begin_push(1, 0))


async def test_several_blocks_are_computed_at_once_where_there_are_cores(
    ps: Ps, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread waits for the others in its first block; with one core there are none."""
    by_thread: dict[int, int] = {}
    used = min(cores, 8 // MIN_HANDED_OUT)
    all_there = threading.Barrier(used)

    def seen() -> None:
        me = threading.get_ident()
        by_thread[me] = by_thread.get(me, 0) + 1
        if by_thread[me] == 1:
            all_there.wait(10)

    watched(monkeypatch, seen)
    await ps.work.finish(sgd(ps))
    assert (threading.get_ident() in by_thread) == (cores == 1)
    assert len(by_thread) == used
    assert sum(by_thread.values()) == 8
    assert np.frombuffer(bits(ps), np.float32).tolist()[-1] == -0.5


async def test_the_loop_serves_others_while_threads_compute(
    ps: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cooperative_work, "usable_cores", lambda: 2)
    served = threading.Event()

    def seen() -> None:
        assert served.wait(10)

    watched(monkeypatch, seen)
    updating = asyncio.ensure_future(ps.work.finish(sgd(ps)))
    await asyncio.sleep(0)
    assert not updating.done()
    with pytest.raises(BusyError):
        ps.store.read(LARGE)
    served.set()
    await updating
    assert not ps.store.busy(LARGE)


async def test_work_that_is_cancelled_while_threads_compute_is_done_at_once(
    ps: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cooperative_work, "usable_cores", lambda: 2)
    computing = threading.Event()
    watched(monkeypatch, computing.set)
    updating = asyncio.ensure_future(ps.work.finish(sgd(ps)))
    await asyncio.sleep(0)
    assert computing.wait(10)
    updating.cancel()
    await asyncio.wait([updating])
    assert updating.cancelled()
    assert not ps.store.busy(LARGE)
    assert set(np.frombuffer(bits(ps), np.float32).tolist()) == {-0.5}
    assert not ps.ended


async def test_a_block_that_fails_in_a_thread_ends_the_task(
    ps: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cooperative_work, "usable_cores", lambda: 2)
    failed = iter(range(100))

    def fail() -> None:
        if next(failed) == 3:
            raise MemoryError

    watched(monkeypatch, fail)
    with pytest.raises(MemoryError):
        await ps.work.finish(sgd(ps))
    assert ps.ended == ["torn"]
    assert ps.store.busy(LARGE)


async def test_nothing_that_was_computed_is_held_by_threads(
    ps: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient may lie in memory of a worker, which has it back with the last reference."""
    monkeypatch.setattr(cooperative_work, "usable_cores", lambda: 2)
    lent = np.ones(SIZE, np.float32)
    let_go: list[int] = []
    weakref.finalize(lent, lambda: let_go.append(threading.get_ident()))
    ps.store.define_optimizer(1, rules.SGD(1.0).to_config())
    work = ps.store.apply(1, LARGE, lent, ps.store.begin_push(1, 0))
    del lent
    await ps.work.finish(work)
    del work
    assert let_go == [threading.get_ident()]
