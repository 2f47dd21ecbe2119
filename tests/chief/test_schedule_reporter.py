"""What ps 0 hears of a coordinator's schedule, and how often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import psync
from inside import chief_of, clocks_of, heard_by
from memory_cluster import MemoryCluster, coordinating, event_of
from psync.chief.schedule_reporter import FINAL_EVERY, FinalClosures
from psync.closures.closure import Closure
from psync.closures.identities import Identity
from psync.closures.queue import ClosureQueue
from psync.errors import ParameterServerLost
from psync.net.connection import Connection
from psync.net.process_state import fresh_process
from psync.wire.closure_numbers import numbered
from psync.wire.codec import Message
from psync.wire.messages import FinalBelow, ReportSchedule

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ReportSchedule]]:
    """All reports that were sent, repetitions too, of a program that begins with no optimizer."""
    sent: list[ReportSchedule] = []
    call = Connection.call

    async def recording(self: Connection, message: Message, *args: Any, **kwargs: Any) -> Any:
        if isinstance(message, ReportSchedule):
            assert self.task == "/job:ps/task:0"
            sent.append(message)
        return await call(self, message, *args, **kwargs)

    monkeypatch.setattr(Connection, "call", recording)
    with fresh_process():
        yield sent


@pytest.fixture
def reports(sent: list[ReportSchedule]) -> list[ReportSchedule]:
    """The same where ps 0 wants them, see ``reporting``."""
    return sent


@asynccontextmanager
async def reporting(
    num_ps: int = 1, num_workers: int = 1
) -> AsyncIterator[tuple[MemoryCluster, psync.ClusterCoordinator]]:
    """A cluster on whose ps 0 somebody has waited for others."""
    async with coordinating(num_ps, num_workers) as (cluster, coordinator):
        clocks_of(cluster.tasks["ps-0"]).wanted.set()
        yield cluster, coordinator


async def test_nothing_is_reported_where_workers_never_wait_for_each_other(sent):
    async with coordinating(num_workers=2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros(2, np.float32), name="w")
        optimizer = psync.optimizers.SGD(1.0)

        async def step():
            await optimizer.apply_gradients([(np.ones(2, np.float32), w)])

        for _ in range(10):
            coordinator.schedule(step)
        await coordinator.join()
        await cluster.stop("worker-1")
        await asyncio.sleep(1)
        coordinator.schedule(step)
        await coordinator.join()
        await coordinator.strategy.run(step)
        await asyncio.sleep(10)
    assert sent == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2),
        lambda: psync.optimizers.SGD(1.0, staleness_bound=psync.StalenessBound(0)),
    ],
    ids=["group", "bound"],
)
async def test_from_the_first_wait_in_a_group_or_at_a_bound_on_ps_0_hears_of_the_schedule(
    sent, make
):
    async with coordinating(num_workers=2) as (_, coordinator):
        with coordinator.strategy.scope():
            w = psync.Variable(np.zeros(2, np.float32), name="w")
            global_step = psync.get_or_create_global_step()

        async def step(optimizer):
            await optimizer.apply_gradients([(np.ones(2, np.float32), w)], global_step)

        async def train(optimizer):
            for _ in range(4):
                coordinator.schedule(step, args=(optimizer,))
            await coordinator.join()
            await asyncio.sleep(1)

        await train(psync.optimizers.SGD(1.0))
        assert sent == []
        await train(make())
        assert [index for index, _ in sent[0].workers] == [0, 1]
        assert sent[0].version == 1
        assert not sent[-1].queued


async def test_a_full_queue_costs_two_reports_or_three(reports):
    async with reporting(num_workers=2) as (_, coordinator):
        await asyncio.sleep(1)
        reports.clear()

        async def step():
            await asyncio.sleep(0.001)

        for _ in range(500):
            coordinator.schedule(step)
        await coordinator.join()
        await asyncio.sleep(1)
        assert reports[0].queued
        assert not reports[-1].queued
        assert reports[-1].in_flight == []
        assert len(reports) <= 4  # full, perhaps the last closures of all, nothing


async def test_a_report_is_repeated_after_a_lost_connection(reports):
    async with reporting(num_workers=1) as (cluster, coordinator):
        await asyncio.sleep(1)
        cluster.network.cut("ps-0:1")

        async def step():
            await asyncio.sleep(5)

        coordinator.schedule(step)
        await asyncio.sleep(3)
        assert clocks_of(cluster.tasks["ps-0"])._busy == {"/job:worker/task:0"}
        await coordinator.join()


async def test_a_lost_ps_ends_the_reports_and_nobody_hears_of_it_here(reports, caplog):
    async with reporting(num_workers=1) as (cluster, coordinator):

        async def step():
            event_of("runs").set()
            await asyncio.sleep(3600)

        coordinator.schedule(step)
        await event_of("runs").wait()
        await cluster.stop("ps-0")
        with pytest.raises(ParameterServerLost):
            await coordinator.join()
        await asyncio.sleep(60)
        assert not chief_of(coordinator)._tasks, "it has ended"
    assert not [r for r in caplog.records if r.name == "psync.chief.schedule_reporter"]
    assert [r for r in caplog.records if r.levelno >= logging.ERROR]  # of the loss itself


# --- which closures are final ------------------------------------------------------------------


def test_ps_tasks_hear_which_closures_are_final_when_enough_of_them_are_and_when_it_is_waited_for():
    told: list[int] = []
    queue = ClosureQueue()
    final = FinalClosures(queue, lambda below, _: told.append(below))
    queue.worker_joined("w")
    for number in range(3):
        queue.schedule(Closure(number, name="step"))
        queue.dispatch()
        queue.finished("w", [number], 0.0)
    final.look(4)
    assert told == []
    final.look(3)
    final.look(1)
    assert told == [3], "nothing is said twice"
    final.tell_again()
    assert told == [3, 3]


def test_ps_tasks_refuse_all_that_was_scheduled_before_an_error_once_it_is_there():
    told: list[int] = []
    queue = ClosureQueue()
    final = FinalClosures(queue, lambda below, _: told.append(below))
    for number in range(2):
        queue.schedule(Closure(number, name="step"))
    final.look_for_errors()
    queue.fail(ValueError("no"))
    final.look_for_errors()
    final.look_for_errors()
    assert told == [2]
    queue.collect_error()
    final.look_for_errors()
    assert told == [2], "what is scheduled from now on is served"


def test_what_may_come_again_is_kept_and_what_is_done_is_not():
    told: list[tuple[int, list[tuple[int, int]]]] = []
    queue = ClosureQueue()
    final = FinalClosures(queue, lambda below, kept: told.append((below, kept)))
    queue.worker_joined("w")
    shard, queued = Identity("shard"), Identity("never on a worker")
    queue.schedule(Closure(0, identity=shard))
    queue.dispatch()
    queue.schedule(Closure(1, identity=queued))
    queue.failed("w", 0, ValueError("no"))
    final.look_for_errors()
    queue.collect_error()
    final.look_for_errors()
    again = Closure(2, identity=shard)
    queue.schedule(again)
    queue.dispatch()
    final.tell_again()
    final.look(1)
    assert again.number == numbered(0, 1)
    queue.finished("w", [2], 0.0)
    final.look(1)
    assert told == [(2, [(0, 1)]), (2, [(0, 1)]), (3, [])], "a lower number would be ignored"


def test_where_many_are_kept_they_are_told_less_often():
    told: list[tuple[int, int]] = []
    queue = ClosureQueue()
    final = FinalClosures(queue, lambda below, kept: told.append((below, len(kept))))
    queue.worker_joined("w")
    shards = [Identity(number, []) for number in range(8 * FINAL_EVERY)]

    def run() -> None:
        for shard in shards:
            closure = Closure(queue.next_id, identity=shard)
            queue.schedule(closure)
            while not closure.worker:
                queue.dispatch()
            queue.finished("w", [closure.id], 0.0)
            final.look()

    run()
    assert len(told) == 8
    for shard in shards:
        queue.identities.undo(shard)
    final.tell_again()
    del told[:-1]
    run()
    assert told == [
        (8192, 8192), (10240, 6144), (11776, 4608), (12928, 3456), (13952, 2432), (14976, 1408),
        (16000, 384),
    ]  # fmt: skip


async def test_a_join_tells_ps_tasks_once_when_it_ends():
    async with coordinating(num_workers=2) as (cluster, coordinator):

        async def step():
            await asyncio.sleep(0.001)

        with heard_by(cluster.tasks["ps-0"], FinalBelow) as heard:
            for _ in range(100):
                coordinator.schedule(step)
            await coordinator.join()
            await asyncio.sleep(1)
            assert [message.closure for message in heard] == [100]
            await coordinator.schedule(step)
            await coordinator.join()
            await asyncio.sleep(1)
            assert [message.closure for message in heard] == [100, 101]
