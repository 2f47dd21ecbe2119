"""psync.datasets: per-worker datasets and their iterators, as steps see them."""

from __future__ import annotations

import asyncio
import gc
import threading

import memory_cluster
import pytest
from memory_cluster import coordinating

import psync
from psync.errors import CaptureError, ClosureInputError, EndOfData, UsageError
from psync.worker_task import WorkerTask


def iterators_of(cluster: memory_cluster.MemoryCluster) -> list[int]:
    """How many iterators each worker holds."""
    found = []
    for task in cluster.tasks.values():
        if isinstance(task, WorkerTask):
            assert task._session is not None
            found.append(len(task._session._iterators))
    return found


async def test_every_worker_reads_its_own():
    async with coordinating(num_workers=2) as (_, coordinator):

        def dataset(context):
            for i in range(100):
                yield context.input_pipeline_id, context.num_input_pipelines, i

        async def step(batches):
            await asyncio.sleep(0.001)
            return psync.get_worker_index(), next(batches)

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(20)]
        await coordinator.join()
        seen: dict[int, list[int]] = {0: [], 1: []}
        for worker, (pipeline, pipelines, i) in await coordinator.fetch(values):
            assert (worker, 2) == (pipeline, pipelines)
            seen[worker].append(i)
        for numbers in seen.values():
            assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize(
    "dataset",
    [lambda: [1, 2, 3], lambda: (n for n in (1, 2, 3)), lambda: range(1, 4)],
    ids=["list", "generator", "range"],
)
async def test_a_dataset_is_any_iterable(dataset):
    async with coordinating(num_workers=1) as (_, coordinator):
        per_worker = coordinator.create_per_worker_dataset(dataset)
        iterator = iter(per_worker)
        values = [coordinator.schedule(lambda it: next(it), args=(iterator,)) for _ in range(3)]
        assert await coordinator.fetch(values) == [1, 2, 3]
        # Each iter() starts anew; a step may capture the iterator.
        again = iter(per_worker)
        assert await coordinator.schedule(lambda: next(again)) == 1
        assert await coordinator.schedule(lambda: next(again)) == 2


async def test_the_end_of_data_is_raised_by_join_when_all_else_is_done():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step(batches):
            await asyncio.sleep(0)
            return next(batches)

        async def slow():
            await asyncio.sleep(0.05)
            memory_cluster.shared["done"] = True
            return "slow"

        iterator = iter(coordinator.create_per_worker_dataset(lambda: [1, 2]))
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(8)]
        last = coordinator.schedule(slow)
        with pytest.raises(EndOfData, match="has no further batch"):
            await coordinator.join()
        assert memory_cluster.shared["done"]
        assert await last == "slow"
        found = []
        for value in values:
            try:
                found.append(await value)
            except EndOfData:
                found.append(0)
        assert sorted(found) == [0, 0, 0, 0, 1, 1, 2, 2]
        await coordinator.join()  # raised once
        counts = coordinator.statistics()["closures"]
        assert (counts.finished, counts.exhausted, counts.failed) == (5, 4, 0)


@pytest.mark.virtual_time
async def test_a_join_hears_of_the_end_that_its_own_closures_met():
    async with coordinating(num_workers=2) as (_, coordinator):

        async def step(batches):
            return next(batches)

        async def slow():
            await asyncio.sleep(10)

        iterator = iter(coordinator.create_per_worker_dataset(list))
        coordinator.schedule(step, args=(iterator,))
        first = asyncio.create_task(coordinator.join())
        await asyncio.sleep(0)
        coordinator.schedule(slow)
        second = asyncio.create_task(coordinator.join())
        with pytest.raises(EndOfData):
            await first
        assert not second.done()
        with pytest.raises(EndOfData):
            await second
        await coordinator.join()


async def test_a_dataset_that_cannot_be_built_fails_only_what_uses_it():
    async with coordinating(num_workers=1) as (_, coordinator):

        def broken():
            raise OSError("no such file")

        iterator = iter(coordinator.create_per_worker_dataset(broken))
        assert await coordinator.schedule(lambda: 1) == 1
        await coordinator.join()

        async def step(batches):
            memory_cluster.shared["ran"] = True

        coordinator.schedule(step, args=(iterator,))
        with pytest.raises(ClosureInputError, match="could not be built: OSError: no such") as info:
            await coordinator.join()
        assert isinstance(info.value.__cause__, OSError)
        assert "ran" not in memory_cluster.shared


async def test_an_error_of_dataset_code_is_the_steps_own():
    async with coordinating(num_workers=1) as (_, coordinator):

        def dataset():
            yield 1
            raise ValueError("bad record")

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        values = [coordinator.schedule(lambda it: next(it), args=(iterator,)) for _ in range(2)]
        with pytest.raises(ValueError, match="bad record"):
            await coordinator.join()
        assert await values[0] == 1


async def test_a_dropped_iterator_is_released_on_the_workers():
    async with coordinating(num_workers=1) as (cluster, coordinator):
        dataset = coordinator.create_per_worker_dataset(lambda: [1, 2, 3])
        iterator = iter(dataset)
        assert await coordinator.schedule(lambda it: next(it), args=(iterator,)) == 1
        assert iterators_of(cluster) == [1]
        del iterator
        gc.collect()
        assert await coordinator.schedule(lambda: 0) == 0  # what was said before has arrived
        await asyncio.sleep(0.01)
        assert iterators_of(cluster) == [0]


async def test_an_iterator_lives_as_long_as_a_closure_needs_it():
    async with coordinating(num_workers=1) as (cluster, coordinator):

        async def step(batches):
            return next(batches)

        def captures():
            batches = iter(coordinator.create_per_worker_dataset(lambda: [7, 8]))
            return coordinator.schedule(lambda: next(batches))

        value = coordinator.schedule(
            step, args=(iter(coordinator.create_per_worker_dataset(lambda: [5, 6])),)
        )
        captured = captures()
        gc.collect()
        assert await coordinator.fetch([value, captured]) == [5, 7]
        gc.collect()
        await asyncio.sleep(0.01)
        assert iterators_of(cluster) == [0]


@pytest.mark.virtual_time
async def test_after_its_worker_was_lost_an_iterator_starts_from_the_beginning():
    async with coordinating(num_workers=1) as (cluster, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: range(10)))

        async def step(batches):
            return next(batches)

        assert await coordinator.schedule(step, args=(iterator,)) == 0
        assert await coordinator.schedule(step, args=(iterator,)) == 1
        await cluster.stop("worker-0")
        await cluster.start("worker-0")
        assert await coordinator.schedule(step, args=(iterator,)) == 0


async def test_iterators_belong_to_steps_and_datasets_to_the_coordinator():
    async with coordinating(num_workers=1) as (_, coordinator):
        dataset = coordinator.create_per_worker_dataset(lambda: [1])
        iterator = iter(dataset)
        assert iter(iterator) is iterator
        with pytest.raises(UsageError, match="outside a step: each worker has its own data"):
            next(iterator)
        with pytest.raises(CaptureError, match=r"pass iter\(dataset\)"):
            coordinator.schedule(lambda: iter(dataset))
        memory_cluster.shared["dataset"] = dataset
        coordinator.schedule(lambda: iter(memory_cluster.shared["dataset"]))
        with pytest.raises(UsageError, match=r"iter\(\) on a per-worker dataset inside a step"):
            await coordinator.join()
        memory_cluster.shared["iterator"] = iterator
        coordinator.schedule(lambda: next(memory_cluster.shared["iterator"]))
        with pytest.raises(UsageError, match="in a way that psync cannot see"):
            await coordinator.join()


async def test_batches_are_loaded_ahead():
    async with coordinating(num_workers=1) as (_, coordinator):
        third = memory_cluster.shared["third"] = threading.Event()

        def dataset():
            for i in range(100):
                if i == 2:
                    memory_cluster.shared["third"].set()
                yield i

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        assert await coordinator.schedule(lambda it: next(it), args=(iterator,)) == 0
        assert await asyncio.to_thread(third.wait, 20)  # nobody has asked for it


@pytest.mark.virtual_time
async def test_under_a_virtual_clock_batches_are_loaded_when_they_are_asked_for():
    async with coordinating(num_workers=1) as (_, coordinator):
        memory_cluster.shared["loaded"] = 0

        def dataset():
            for i in range(100):
                memory_cluster.shared["loaded"] += 1
                yield i

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        assert await coordinator.schedule(lambda it: next(it), args=(iterator,)) == 0
        assert memory_cluster.shared["loaded"] == 1


async def test_what_is_no_dataset_function_is_refused():
    async with coordinating(num_workers=1) as (_, coordinator):
        with pytest.raises(UsageError, match="dataset_fn: expected a function, got int"):
            coordinator.create_per_worker_dataset(3)
        with pytest.raises(UsageError, match="needs the arguments a, b"):
            coordinator.create_per_worker_dataset(lambda a, b: [])
