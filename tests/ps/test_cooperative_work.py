from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pytest

from psync.errors import PsyncError
from psync.numerics import memory
from psync.numerics.rules import SGD, Adam, Lamb, RuleOptions
from psync.ps import cooperative_work
from psync.ps.cooperative_work import LongWork
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
    options = RuleOptions(gradient_accumulation_steps=2)
    each = [Adam(0.1), Lamb(0.1), Adam(0.1).with_options(options)]

    def push(store: ShardStore, number: int, seed: int) -> Work:
        store.define_optimizer(number, each[number].to_config())
        grad = store.check_apply(number, LARGE, gradient(seed))
        return store.apply_checked(number, LARGE, grad, store.begin_push(number, 0))

    def mean(store: ShardStore) -> Work:
        given = store.mean_of([gradient(2), gradient(3)], [1, 2], scale=0.5)
        return store.apply_checked(0, LARGE, given, store.begin_push(0, 0))

    for number in range(len(each)):
        for seed in range(2):
            yield functools.partial(push, number=number, seed=seed)
    yield mean
    yield lambda store: store.assign(LARGE, "add", gradient(4))
    yield lambda store: store.average(LARGE, OTHER, 0.9)


def watched(monkeypatch: pytest.MonkeyPatch, seen: Callable[[], None]) -> None:
    """Let ``seen`` be called, by who computes it, before each block of SGD."""
    usual = SGD.apply

    def apply(self: SGD, *args: Any) -> None:
        seen()
        usual(self, *args)

    monkeypatch.setattr(SGD, "apply", apply)


def sgd(ps: Ps) -> Work:
    ps.store.define_optimizer(1, SGD(1.0).to_config())
    return ps.store.apply_checked(1, LARGE, np.ones(SIZE, np.float32), ps.store.begin_push(1, 0))


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
