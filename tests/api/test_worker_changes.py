"""Workers that are added to a running cluster and removed from it, as a program does it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import psync
from local_training import at_once, declare, strategy_of
from memory_cluster import MemoryCluster, coordinating, event_of
from psync.errors import (
    ClosedError,
    ConfigurationError,
    ConnectFailed,
    DeadlineExceeded,
    ParameterServerLost,
    WorkerLost,
)

pytestmark = pytest.mark.virtual_time

W1, W2 = "/job:worker/task:1", "/job:worker/task:2"


async def where() -> int:
    await asyncio.sleep(1)
    return psync.get_worker_index()


async def workers_of(coordinator: psync.ClusterCoordinator, count: int = 12) -> set[int]:
    """The workers that take part when there is enough to do."""
    values = [coordinator.schedule(where) for _ in range(count)]
    await coordinator.join()
    return set(await coordinator.fetch(values))


async def test_a_worker_that_is_added_gets_closures():
    async with coordinating(1, 2) as (cluster, coordinator):
        values = [coordinator.schedule(where) for _ in range(30)]
        await cluster.start("worker-2")
        assert await coordinator.add_worker("worker-2:1") == W2
        assert set(await coordinator.fetch(values)) == {0, 1, 2}


async def test_the_index_of_a_worker_that_was_removed_is_given_to_the_next_one():
    async with coordinating(1, 2) as (cluster, coordinator):
        await coordinator.remove_worker("/job:worker/task:0")
        assert cluster.tasks["worker-0"].stopped.is_set()
        assert await workers_of(coordinator) == {1}
        await cluster.stop("worker-0")
        await cluster.start("worker-0")
        assert await coordinator.add_worker("worker-0:1") == "/job:worker/task:0"
        assert await workers_of(coordinator) == {0, 1}


async def test_a_worker_may_be_added_under_the_index_that_it_calls_itself():
    async with coordinating(1, 2) as (cluster, coordinator):
        await cluster.start("worker-7")
        assert await coordinator.add_worker("worker-7:1", index=7) == "/job:worker/task:7"
        assert await workers_of(coordinator) == {0, 1, 2}, "steps count them without gaps"


@pytest.mark.parametrize(
    ("address", "index", "text"),
    [
        ("nonsense", None, "expected a port"),
        (":1", None, "has no host"),
        ("worker-0:1", None, "have the same address"),
        ("ps-0:1", None, "have the same address"),
        ("worker-2:1", 1, "the cluster has a worker 1 already, at worker-1:1"),
        ("worker-2:1", -1, "expected a task index"),
    ],
)
async def test_what_cannot_be_a_new_worker_is_refused(address, index, text):
    async with coordinating(1, 2) as (_, coordinator):
        with pytest.raises(ConfigurationError, match=text):
            await coordinator.add_worker(address, index=index)


async def test_a_worker_that_never_comes_is_given_up_after_the_timeout():
    async with coordinating(1, 2) as (_, coordinator):
        with pytest.raises(ConnectFailed, match=f"{W2} at nowhere:1 could not be added within 5 s"):
            await coordinator.add_worker("nowhere:1", timeout=5)
        assert await workers_of(coordinator) == {0, 1}


async def test_a_worker_is_removed_when_its_closure_has_ended():
    async with coordinating(1, 2) as (cluster, coordinator):

        async def step():
            event_of(f"begun {psync.get_worker_index()}").set()
            await event_of("go on").wait()

        for _ in range(2):
            coordinator.schedule(step)
        await event_of("begun 1").wait()
        with pytest.raises(DeadlineExceeded, match=f"{W1} has not left within 5 s"):
            await coordinator.remove_worker(W1, timeout=5)
        assert not cluster.tasks["worker-1"].stopped.is_set()
        removing = asyncio.create_task(coordinator.remove_worker(W1))
        await asyncio.sleep(1)
        event_of("go on").set()
        await removing
        assert cluster.tasks["worker-1"].stopped.is_set()
        await coordinator.join()
        with pytest.raises(ConfigurationError, match=r"expected a worker of the cluster \(/job:w"):
            await coordinator.remove_worker(W1)


def test_nobody_is_added_or_removed_outside_of_a_running_coordinator():
    coordinator = psync.ClusterCoordinator(strategy_of())
    with pytest.raises(ClosedError, match="add_worker: the coordinator is not running"):
        at_once(coordinator.add_worker("worker-2:1"))
    with pytest.raises(ClosedError, match="remove_worker: the coordinator is not running"):
        at_once(coordinator.remove_worker(W1))


# --- what was made for fewer workers -----------------------------------------------------------


async def test_an_added_worker_reads_the_share_of_another_one_from_its_beginning():
    async with coordinating(1, 2) as (cluster, coordinator):

        def shares(context):
            assert context.num_input_pipelines == 2
            return [10 * context.input_pipeline_id + i for i in range(100)]

        data = iter(coordinator.create_per_worker_dataset(shares))

        async def step(data):
            await asyncio.sleep(1)
            return psync.get_worker_index(), next(data)

        await cluster.start("worker-2")
        await coordinator.add_worker("worker-2:1")
        values = [coordinator.schedule(step, args=(data,)) for _ in range(9)]
        read = await coordinator.fetch(values)
        for worker, first in ((0, 0), (1, 10), (2, 0)):
            mine = sorted(element for index, element in read if index == worker)
            assert mine == list(range(first, first + len(mine)))
            assert mine
        assert sorted(await data.positions()) == [0, 1]


async def test_a_dataset_that_is_made_later_has_a_share_for_the_added_worker():
    async with coordinating(1, 2) as (cluster, coordinator):
        await cluster.start("worker-2")
        await coordinator.add_worker("worker-2:1")

        def share(context):
            return [(context.num_input_pipelines, context.input_pipeline_id)] * 100

        data = iter(coordinator.create_per_worker_dataset(share))

        async def step(data):
            await asyncio.sleep(1)
            return next(data)

        values = [coordinator.schedule(step, args=(data,)) for _ in range(9)]
        assert set(await coordinator.fetch(values)) == {(3, 0), (3, 1), (3, 2)}
        assert sorted(await data.positions()) == [0, 1, 2]


async def test_a_distributed_dataset_keeps_its_shares():
    async with coordinating(1, 2) as (cluster, coordinator):
        distributed = coordinator.strategy.experimental_distribute_dataset([1, 2, 3, 4])
        await cluster.start("worker-2")
        await coordinator.add_worker("worker-2:1")
        data = iter(coordinator.create_per_worker_dataset(distributed))

        async def step(data):
            await asyncio.sleep(1)
            return psync.get_worker_index(), next(data), list(distributed)

        values = [coordinator.schedule(step, args=(data,)) for _ in range(3)]
        read = {index: (first, rest) for index, first, rest in await coordinator.fetch(values)}
        assert read == {0: (1, [1, 3]), 1: (2, [2, 4]), 2: (1, [1, 3])}


async def test_an_added_worker_shares_a_copy_of_a_variable_and_no_sum_notices():
    async with coordinating(1, 2) as (cluster, coordinator):
        with coordinator.strategy.scope():
            total = psync.Variable(
                np.zeros((), np.int64),
                synchronization=psync.VariableSynchronization.ON_READ,
                aggregation=psync.VariableAggregation.SUM,
            )
        await cluster.start("worker-2")
        await coordinator.add_worker("worker-2:1")

        async def step():
            await asyncio.sleep(1)
            await total.assign_add(1)
            return psync.get_worker_index()

        values = [coordinator.schedule(step) for _ in range(9)]
        assert set(await coordinator.fetch(values)) == {0, 1, 2}
        assert await total.read() == 9


# --- tasks that whoever started them does not start again ----------------------------------------


def not_again(coordinator: psync.ClusterCoordinator, task: str, code: int = 9) -> None:
    given_up = coordinator.strategy.cluster_resolver.platform.given_up
    given_up.note(f"{task}:1", f"exited with code {code} and is not started again")


async def give_up(cluster: MemoryCluster, coordinator: psync.ClusterCoordinator, task: str) -> None:
    await cluster.stop(task)
    not_again(coordinator, task)


async def test_join_ends_when_no_worker_will_come_again():
    async with coordinating(1, 2) as (cluster, coordinator):

        async def step():
            await event_of("never").wait()

        values = [coordinator.schedule(step) for _ in range(5)]
        joining = asyncio.create_task(coordinator.join())
        await asyncio.sleep(1)
        await give_up(cluster, coordinator, "worker-0")
        await asyncio.sleep(60)
        assert not joining.done(), "the other one goes on"
        text = "/job:worker/task:0 exited with code 9 and is not started"
        with pytest.raises(DeadlineExceeded, match=text):
            await coordinator.join(timeout=1)
        await give_up(cluster, coordinator, "worker-1")
        with pytest.raises(WorkerLost) as caught:
            await joining
        assert caught.value.message == (
            "/job:worker/task:1 exited with code 9 and is not started again, and there is no other "
            "worker; /job:worker/task:0 exited with code 9 and is not started again"
        )
        assert all(value.done() for value in values)
        await coordinator.join()  # nothing was scheduled since
        coordinator.schedule(step)
        with pytest.raises(WorkerLost):
            await coordinator.join()
        with pytest.raises(WorkerLost):
            await coordinator.strategy.run(step)
        with pytest.raises(WorkerLost):
            await coordinator.join()


async def test_a_worker_that_is_added_makes_up_for_those_that_were_given_up():
    async with coordinating(1, 1) as (cluster, coordinator):
        await give_up(cluster, coordinator, "worker-0")
        await cluster.start("worker-0")  # nobody looks for it: it is another one
        with pytest.raises(WorkerLost):
            await workers_of(coordinator)
        assert await coordinator.add_worker("worker-0:1") == "/job:worker/task:0"
        assert await workers_of(coordinator) == {0}


@pytest.mark.parametrize("ends", ["an added one does not come", "the other one is removed"])
async def test_join_ends_when_the_last_worker_that_could_have_come_does_not(ends: str):
    num_workers = 1 if ends.startswith("an added") else 2
    async with coordinating(1, num_workers) as (cluster, coordinator):
        if num_workers == 2:
            await cluster.stop("worker-1")  # it may come again, as far as anybody knows
        await cluster.stop("worker-0")
        await asyncio.sleep(1)
        coordinator.schedule(psync.get_worker_index)
        joining = asyncio.create_task(coordinator.join())
        if num_workers == 1:
            last = asyncio.create_task(coordinator.add_worker("nowhere:1", index=7, timeout=10))
        await asyncio.sleep(1)
        not_again(coordinator, "worker-0")
        await asyncio.sleep(1)
        assert not joining.done()
        if num_workers == 1:
            with pytest.raises(ConnectFailed):
                await last
        else:
            await coordinator.remove_worker(W1)
        with pytest.raises(WorkerLost, match="worker/task:0 exited with code 9"):
            async with asyncio.timeout(1):
                await joining


@pytest.mark.parametrize("turns", range(6))
async def test_a_worker_that_is_removed_while_it_is_given_up_is_no_fault(turns: int, caplog):
    async with coordinating(1, 2) as (cluster, coordinator):
        await cluster.stop("worker-1")
        await asyncio.sleep(1)
        removing = asyncio.create_task(coordinator.remove_worker(W1))
        for _ in range(turns):
            await asyncio.sleep(0)
        not_again(coordinator, "worker-1")
        await removing
        await asyncio.sleep(1)
        assert await workers_of(coordinator) == {0}
        assert "a supervisor of the coordinator failed" not in caplog.text


@pytest.mark.parametrize("when", ["before", "while it is waited for"])
@pytest.mark.parametrize(
    ("task", "error", "text"),
    [
        ("ps-0", ParameterServerLost, "ps-0:1 is lost: it exited with code 2"),
        ("ps-1", ParameterServerLost, "ps-1:1 is lost: it exited with code 2"),
        ("worker-0", ConnectFailed, "did not come up: /job:worker/task:0 exited with code 2"),
        ("worker-1", ConnectFailed, "did not come up: /job:worker/task:1 exited with code 2"),
    ],
)
async def test_a_task_that_is_given_up_at_the_start_is_not_waited_for(
    task: str, error: type[Exception], text: str, when: str
):
    cluster = MemoryCluster(2, 2)
    for other in {"ps-0", "ps-1", "worker-0", "worker-1"} - {task}:
        await cluster.start(other)
    coordinator = psync.ClusterCoordinator(cluster.strategy())
    if when == "before":
        not_again(coordinator, task, 2)
    starting = asyncio.create_task(coordinator.start())
    await asyncio.sleep(1)
    not_again(coordinator, task, 2)
    with pytest.raises(error, match=text):
        async with asyncio.timeout(1):
            await starting
    await cluster.stop_all()


async def test_a_ps_that_is_given_up_is_lost_at_once_and_the_error_says_why():
    async with coordinating(2, 1) as (cluster, coordinator):
        v = declare(coordinator.strategy, v=0.0)

        async def step():
            await v.assign_add(1.0)
            await event_of("never").wait()

        coordinator.schedule(step)
        await asyncio.sleep(1)
        await give_up(cluster, coordinator, "ps-1")
        for _ in range(2):
            with pytest.raises(ParameterServerLost) as caught:
                async with asyncio.timeout(1):
                    await coordinator.join()
            assert caught.value.message == (
                "/job:ps/task:1 at ps-1:1 is lost: it exited with code 9 and is not started again"
            )


async def test_nobody_waits_for_the_recovery_of_a_ps_that_is_given_up(tmp_path):
    async with coordinating(2, 1) as (cluster, coordinator):
        v = declare(coordinator.strategy, v=np.zeros(4))
        manager = psync.CheckpointManager(psync.Checkpoint(v=v), tmp_path)
        await manager.save()
        await cluster.stop("ps-1")
        await asyncio.sleep(10)  # the recovery has begun, and waits for somebody who starts it
        not_again(coordinator, "ps-1")
        with pytest.raises(
            ParameterServerLost,
            match="the rollback to a checkpoint failed: /job:ps/task:1 exited with code 9 and is "
            "not started again",
        ):
            async with asyncio.timeout(1):
                await v.read()
