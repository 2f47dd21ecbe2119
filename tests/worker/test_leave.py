"""A worker that leaves finishes what it runs, and nothing is done twice."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

import psync
from memory_cluster import MemoryCluster, coordinating, event_of

pytestmark = pytest.mark.virtual_time

CHIEF, W0, W1 = "/job:chief/task:0", "/job:worker/task:0", "/job:worker/task:1"


def leaving_of(cluster: MemoryCluster) -> asyncio.Task[None]:
    """Ask worker 0 to leave."""
    worker: Any = cluster.tasks["worker-0"]
    return asyncio.create_task(worker.leave("SIGTERM"))


async def held() -> None:
    event_of("begun").set()
    await event_of("go on").wait()


async def where(seconds: float = 0.0) -> int:
    await asyncio.sleep(seconds)
    return psync.get_worker_index()


def counts(coordinator: psync.ClusterCoordinator) -> tuple[int, int, int]:
    """How many closures have finished, were put back, were given back."""
    closures = coordinator.statistics()["closures"]
    return closures.finished, closures.put_back, closures.given_back


async def test_a_worker_that_leaves_finishes_its_closure_and_its_update_counts_once(caplog):
    async with coordinating(1, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            counter = psync.Variable(np.zeros((), np.int64))

        async def step():
            event_of(f"begun {psync.get_worker_index()}").set()
            await event_of("go on").wait()
            await counter.assign_add(1)
            return psync.get_worker_index()

        values = [coordinator.schedule(step) for _ in range(2)]
        await event_of("begun 0").wait()
        await event_of("begun 1").wait()
        values += [coordinator.schedule(step) for _ in range(4)]
        with caplog.at_level(logging.INFO):
            leaving = leaving_of(cluster)
            await asyncio.sleep(5)
            assert not leaving.done()
            event_of("go on").set()
            await leaving
            await coordinator.join()
            await cluster.stop("worker-0")
        assert await counter.read() == 6
        where = await coordinator.fetch(values)
        assert sorted(where) == [0, 1, 1, 1, 1, 1]
        assert counts(coordinator)[:2] == (6, 0)
        assert f"{W0} has left (SIGTERM)" in caplog.text
        assert f"{W0} is lost" not in caplog.text
        named = [r.message for r in caplog.records if "leaves when closure" in r.message]
        assert len(named) == 1, "once"
        assert "worker 0 leaves when closure 0 (" in named[0]


async def test_what_has_not_begun_is_given_back_and_runs_elsewhere():
    async with coordinating(1, 1) as (cluster, coordinator):
        coordinator.schedule(held)
        await event_of("begun").wait()
        values = [coordinator.schedule(where) for _ in range(5)]
        await asyncio.sleep(1)
        leaving = leaving_of(cluster)
        await asyncio.sleep(1)
        assert counts(coordinator) == (0, 0, 1)
        event_of("go on").set()
        await leaving
        await cluster.stop("worker-0")
        await asyncio.sleep(1)
        assert not any(value.done() for value in values)
        await cluster.start("worker-0")
        await coordinator.join()
        assert await coordinator.fetch(values) == [0] * 5


async def test_nothing_begins_while_the_coordinator_has_not_answered():
    async with coordinating(1, 1) as (cluster, coordinator):

        async def later():
            event_of("later").set()

        coordinator.schedule(held)
        await event_of("begun").wait()
        values = [coordinator.schedule(later) for _ in range(5)]
        await asyncio.sleep(1)
        links = cluster.network.links("worker-0:1")
        for link in links:
            link.to_server.stall()  # the answer is on its way
        leaving = leaving_of(cluster)
        await asyncio.sleep(1)
        event_of("go on").set()
        await asyncio.sleep(1)
        assert not event_of("later").is_set()
        for link in links:
            link.to_server.flow()
        await leaving
        assert not event_of("later").is_set()
        assert counts(coordinator) == (1, 0, 1)
        del values


async def test_an_idle_worker_leaves_at_once_and_nobody_waits_for_it():
    async with coordinating(1, 2) as (cluster, coordinator):
        before = asyncio.get_running_loop().time()
        await leaving_of(cluster)
        assert asyncio.get_running_loop().time() - before < 0.1
        assert cluster.tasks["worker-0"].stopped.is_set()
        await cluster.stop("worker-0")

        values = [coordinator.schedule(where) for _ in range(4)]
        await coordinator.join(timeout=60)
        assert await coordinator.fetch(values) == [1] * 4


async def test_a_worker_without_a_coordinator_leaves_at_once():
    cluster = MemoryCluster(1, 1)
    await cluster.start_all()
    task = cluster.tasks["worker-0"]
    await task.leave("SIGTERM")
    await task.leave("SIGTERM")
    assert task.stopped.is_set()
    await cluster.stop_all()


async def test_a_worker_that_left_is_not_attached_and_may_come_back_later(caplog):
    async with coordinating(1, 2) as (cluster, coordinator):
        await leaving_of(cluster)
        await asyncio.sleep(30)  # it still listens
        await cluster.stop("worker-0")
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(100)
        assert "has been waiting for a connection" not in caplog.text, "nobody waits for it"
        await cluster.start("worker-0")
        await asyncio.sleep(20)

        values = [coordinator.schedule(where, (1.0,)) for _ in range(4)]
        await coordinator.join()
        assert sorted(await coordinator.fetch(values)) == [0, 0, 1, 1]


async def test_join_says_that_all_workers_have_left():
    async with coordinating(1, 1) as (cluster, coordinator):
        await leaving_of(cluster)
        await cluster.stop("worker-0")

        coordinator.schedule(where)
        with pytest.raises(psync.errors.DeadlineExceeded, match=f"no worker .* \\({W0} left"):
            await coordinator.join(timeout=5)


@pytest.mark.parametrize("ends", ["with an error", "with a large result"])
async def test_a_step_that_ends_while_its_worker_leaves_ends_like_any_other(ends):
    async with coordinating(1, 1) as (cluster, coordinator):

        async def step():
            event_of("begun").set()
            await event_of("go on").wait()
            if ends == "with an error":
                raise ValueError("no luck")
            return np.arange(500_000)

        value = coordinator.schedule(step)
        await event_of("begun").wait()
        leaving = leaving_of(cluster)
        await asyncio.sleep(1)
        event_of("go on").set()
        await leaving
        await cluster.stop("worker-0")
        if ends == "with an error":
            with pytest.raises(ValueError, match="no luck"):
                await coordinator.join()
        else:
            assert (await value.fetch()).sum() == np.arange(500_000).sum()
        assert counts(coordinator)[1] == 0


async def test_a_worker_that_dies_while_it_leaves_is_no_loss_to_its_closure(caplog):
    async with coordinating(1, 2, max_losses=1) as (cluster, coordinator):

        async def step():
            event_of(f"begun {psync.get_worker_index()}").set()
            if psync.get_worker_index() == 0:
                await asyncio.Event().wait()
            return psync.get_worker_index()

        value = coordinator.schedule(step)
        await event_of("begun 0").wait()
        leaving = leaving_of(cluster)
        await asyncio.sleep(1)
        await cluster.stop("worker-0")
        await asyncio.gather(leaving, return_exceptions=True)
        assert await value.fetch() == 1
        assert counts(coordinator)[1] == 1


async def test_a_push_that_the_step_did_not_wait_for_is_answered_before_its_worker_leaves():
    async with coordinating(1, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            counter = psync.Variable(np.zeros((), np.int64))
        await counter.read()

        async def step():
            await counter.read()  # so that there is a connection
            event_of("begun").set()
            await event_of("go on").wait()
            pushing = asyncio.ensure_future(counter.assign_add(1))
            await asyncio.sleep(0)
            pushing.cancel()

        value = coordinator.schedule(step)
        await event_of("begun").wait()
        leaving = leaving_of(cluster)
        links = cluster.network.links("ps-0:1")
        for link in links:
            link.to_server.stall()
        event_of("go on").set()
        await asyncio.sleep(3)
        assert not leaving.done()
        for link in links:
            link.to_server.flow()
        await leaving
        await value
        assert await counter.read() == 1


async def test_synchronous_steps_need_fewer_gradients_as_soon_as_a_worker_has_left():
    async with coordinating(1, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            weights = psync.Variable(np.zeros(2, np.float32))
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(1.0), replicas_to_aggregate=2, total_num_replicas=2
        )

        async def step(pause):
            value = await weights.read()
            if pause:
                event_of(f"begun {psync.get_worker_index()}").set()
                await event_of("go on").wait()
            return await optimizer.apply_gradients([(np.ones_like(value), weights)], global_step)

        both = [coordinator.schedule(step, args=(True,)) for _ in range(2)]
        for index in range(2):
            await event_of(f"begun {index}").wait()
        rest = [coordinator.schedule(step, args=(False,)) for _ in range(10)]
        leaving = leaving_of(cluster)
        await asyncio.sleep(1)
        event_of("go on").set()
        await leaving
        await coordinator.join(timeout=10)
        results = await coordinator.fetch(both)
        assert [result.outcome for result in results] == [psync.Outcome.ACCEPTED] * 2
        assert results[0].count == 2, "what it ran counted, in a step of two"
        assert [result.count for result in await coordinator.fetch(rest)] == [1] * 10
        assert await global_step.read() == 11


async def test_a_replica_that_runs_is_finished_before_its_worker_leaves_and_gangs_go_on():
    async with coordinating(1, 3) as (cluster, coordinator):

        async def replica():
            context = psync.get_replica_context()
            event_of("begun").set()
            await event_of("go on").wait()
            return await context.all_reduce("sum", np.ones(()))

        strategy = coordinator.strategy
        running = asyncio.create_task(strategy.run(replica))
        await event_of("begun").wait()
        leaving = leaving_of(cluster)
        await asyncio.sleep(1)
        second = asyncio.create_task(strategy.run(replica))
        event_of("go on").set()
        for expected, run in ((3.0, running), (2.0, second)):
            results = strategy.experimental_local_results(await run)
            assert [float(value) for value in results] == [expected] * len(results)
            assert len(results) == int(expected)
        await leaving


async def test_a_worker_whose_coordinator_does_not_answer_leaves_all_the_same():
    async with coordinating(1, 1) as (cluster, coordinator):
        await coordinator.schedule(int)
        cluster.network.partition("chief-0", "worker-0:1")
        began = asyncio.get_running_loop().time()
        await leaving_of(cluster)
        assert asyncio.get_running_loop().time() - began < 60
        cluster.network.heal("chief-0", "worker-0:1")


async def test_results_that_are_on_their_way_come_before_the_word_that_their_worker_has_left():
    async with coordinating(1, 1) as (cluster, coordinator):

        async def step():
            return np.ones(1 << 20, np.float32)

        value = coordinator.schedule(step)
        await asyncio.sleep(0)
        for link in cluster.network.links("worker-0:1"):
            link.to_client.stall()
        await asyncio.sleep(1)
        leaving = leaving_of(cluster)
        await asyncio.sleep(1)
        assert not leaving.done()
        for link in cluster.network.links("worker-0:1"):
            link.to_client.flow()
        await leaving
        assert (await value == 1).all()
        assert counts(coordinator)[:2] == (1, 0)
