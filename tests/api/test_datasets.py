"""Per-worker datasets and their iterators, as steps see them."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import threading
import weakref

import numpy as np
import pytest

import memory_cluster
import psync
from inside import iterators_of as held_by
from local_training import inside_a_step, strategy_of
from loops import for_each
from memory_cluster import coordinating, until
from psync import PerWorkerDataset
from psync.api.datasets import capture_dataset
from psync.errors import (
    ClosedError,
    ClosureInputError,
    ConfigurationError,
    EndOfData,
    SerializationError,
    UsageError,
)
from psync.serialization.functions import FunctionTable
from psync.worker_task import WorkerTask


async def take(batches):
    return next(batches)


def iterators_of(cluster: memory_cluster.MemoryCluster) -> list[int]:
    """How many iterators each worker holds."""
    return [len(held_by(task)) for task in cluster.tasks.values() if isinstance(task, WorkerTask)]


async def test_every_worker_reads_its_own_and_the_position_is_what_its_steps_were_handed():
    async with coordinating(num_workers=2) as (_, coordinator):

        def dataset(context):
            for i in range(100):
                yield context.input_pipeline_id, context.num_input_pipelines, i

        async def step(batches):
            await asyncio.sleep(0.001)
            return psync.get_worker_index(), next(batches)

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        assert await iterator.positions() == {0: 0, 1: 0}
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(20)]
        await coordinator.join()
        seen: dict[int, list[int]] = {0: [], 1: []}
        for worker, (pipeline, pipelines, i) in await coordinator.fetch(values):
            assert (worker, 2) == (pipeline, pipelines)
            seen[worker].append(i)
        for numbers in seen.values():  # closures that were moved may run after later ones
            assert sorted(numbers) == list(range(len(numbers)))
        assert await iterator.positions() == {0: len(seen[0]), 1: len(seen[1])}


@pytest.mark.parametrize(
    ("dataset", "batches"),
    [
        (lambda: [1, 2, 3], [1, 2, 3]),
        (lambda: (n for n in (1, 2, 3)), [1, 2, 3]),
        (lambda: range(1, 4), [1, 2, 3]),
        (  # arrays are cut into batches on the worker
            psync.data.from_arrays((np.arange(5), np.arange(5) * 2), batch_size=3),
            [([0, 1, 2], [0, 2, 4]), ([3, 4], [6, 8])],
        ),
    ],
    ids=["list", "generator", "range", "arrays"],
)
async def test_a_dataset_is_any_iterable(dataset, batches):
    async with coordinating(num_workers=1) as (_, coordinator):
        per_worker = coordinator.create_per_worker_dataset(dataset)
        iterator = iter(per_worker)
        values = [coordinator.schedule(lambda it: next(it), args=(iterator,)) for _ in batches]
        np.testing.assert_equal(await coordinator.fetch(values), batches)
        # Each iter() starts anew; a step may capture the iterator.
        again = iter(per_worker)
        for batch in batches[:2]:
            found = await coordinator.schedule(lambda: next(again))
            np.testing.assert_equal(found, batch)


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

        async def slow():
            await asyncio.sleep(10)

        iterator = iter(coordinator.create_per_worker_dataset(list, end="first"))
        coordinator.schedule(take, args=(iterator,))
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


async def test_another_word_for_the_end_is_refused():
    async with coordinating() as (_, coordinator):
        with pytest.raises(ConfigurationError, match='end: expected "all" or "first", got \'last'):
            coordinator.create_per_worker_dataset(list, end="last")


@pytest.mark.virtual_time
async def test_ends_of_an_iterator_that_is_dropped_are_forgotten():
    async with coordinating(num_workers=2) as (_, coordinator):
        data = iter(coordinator.create_per_worker_dataset(lambda: [1]))
        for _ in range(3):
            coordinator.schedule(take, args=(data,))
        with pytest.raises(EndOfData):
            await coordinator.join()
        dispatcher = coordinator._running("a test")._queue.dispatcher
        assert dispatcher.ended
        del data
        gc.collect()
        await until(lambda: not dispatcher.ended)


def broken():
    raise OSError("no such file")


def declares_a_variable():
    from psync import Variable

    Variable(1.0)
    return []


@pytest.mark.parametrize(
    ("dataset", "error", "text"),
    [(broken, OSError, "OSError: no such"), (declares_a_variable, UsageError, "UsageError")],
)
async def test_a_dataset_that_cannot_be_built_fails_only_what_uses_it(dataset, error, text):
    async with coordinating(num_workers=1) as (_, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        assert await coordinator.schedule(lambda: 1) == 1
        await coordinator.join()

        async def step(batches):
            memory_cluster.shared["ran"] = True

        coordinator.schedule(step, args=(iterator,))
        with pytest.raises(ClosureInputError, match=f"could not be built: {text}") as info:
            await coordinator.join()
        assert isinstance(info.value.__cause__, error)
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


async def test_an_iterator_lives_as_long_as_a_closure_needs_it():
    async with coordinating(num_workers=1) as (cluster, coordinator):

        def captures():
            batches = iter(coordinator.create_per_worker_dataset(lambda: [7, 8]))
            return coordinator.schedule(lambda: next(batches))

        value = coordinator.schedule(
            take, args=(iter(coordinator.create_per_worker_dataset(lambda: [5, 6])),)
        )
        captured = captures()
        gc.collect()
        assert await coordinator.fetch([value, captured]) == [5, 7]
        gc.collect()
        await until(lambda: iterators_of(cluster) == [0])


def test_iterators_belong_to_steps_and_datasets_to_the_coordinator():
    dataset = per_worker(lambda: [1])
    iterator = iter(dataset)
    assert iter(iterator) is iterator
    with pytest.raises(NotImplementedError, match="outside a step: each worker has"):
        next(iterator)
    with pytest.raises(SerializationError, match=r"iterator = iter\(dataset\)"):
        FunctionTable().register(lambda: iter(dataset))
    built = per_worker(lambda: [1]).build()
    with pytest.raises(UsageError, match="on the coordinator: only workers read its elements"):
        list(built)
    with inside_a_step():
        with pytest.raises(RuntimeError, match=r"iter\(\) on a per-worker dataset inside a step"):
            iter(dataset)


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


def per_worker(source, num_workers=1):
    """What ``create_per_worker_dataset`` makes, of a coordinator that is not there."""
    captured, function = capture_dataset(source, FunctionTable())
    coordinator = psync.ClusterCoordinator(strategy_of())
    dataset = psync.DistributedDataset(captured, num_workers, None)
    return PerWorkerDataset(dataset, function, coordinator)


@for_each(
    "source, error, text",
    [
        (3, ValueError, "expected a dataset function or an iterable of batches, got int"),
        (lambda a, b: [], UsageError, "needs the arguments a, b"),
        (iter([1, 2]), UsageError, "can be iterated over only once"),
        ((np.zeros(3), np.zeros(3)), UsageError, r"tuple of arrays\nhint: psync.data.from_arrays"),
        ([threading.Lock()], SerializationError, r"^the dataset holds \[0\] \(_thread.lock\), wh"),
    ],
)
def test_what_is_no_dataset_is_refused_where_it_is_given(source, error, text):
    with pytest.raises(error, match=text):
        per_worker(source)
    made = per_worker([1])
    for source in (made, iter(made)):
        with pytest.raises(UsageError, match="which is already per worker"):
            per_worker(source)
    with pytest.raises(SerializationError, match=r'^dataset function "<lambda>" captures "made"'):
        per_worker(lambda: made)


# --- iterables --------------------------------------------------------------------------------


class Loader:
    """As data loaders are: it has a length, and can be iterated over again and again."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


async def test_an_iterable_is_captured_when_the_dataset_is_created():
    async with coordinating(num_workers=1) as (_, coordinator):
        batches = [np.zeros(3), np.ones(3)]
        iterator = iter(coordinator.create_per_worker_dataset(Loader(batches)))
        batches[0] += 7
        batches.clear()
        values = [coordinator.schedule(take, args=(iterator,)) for _ in range(2)]
        assert [value.tolist() for value in await coordinator.fetch(values)] == [[0] * 3, [1] * 3]
        coordinator.schedule(take, args=(iterator,))
        with pytest.raises(EndOfData, match="has no further batch"):
            await coordinator.join()


async def test_every_worker_gets_the_whole_of_an_iterable():
    async with coordinating(num_workers=2) as (_, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(["a", "b"]))

        async def both(batches):
            return psync.get_worker_index(), next(batches) + next(batches)

        values = [coordinator.schedule(both, args=(iterator,)) for _ in range(2)]
        assert sorted(await coordinator.fetch(values)) == [(0, "ab"), (1, "ab")]


async def test_a_torch_data_loader_is_a_dataset():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    async with coordinating(num_workers=1) as (_, coordinator):
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6)), batch_size=4
        )
        per_worker = coordinator.create_per_worker_dataset(loader)
        assert per_worker.element_spec == [
            psync.TensorSpec((None,), "float32"), psync.TensorSpec((None,), "int64"),
        ]  # fmt: skip
        iterator = iter(per_worker)

        async def step(batches):
            x, y = next(batches)
            return x.numpy().tolist(), len(y)

        assert await coordinator.schedule(step, args=(iterator,)) == ([0, 1, 2, 3], 4)
        assert await coordinator.schedule(step, args=(iterator,)) == ([4, 5], 2)


def declares():
    return psync.Variable(1.0)


def test_a_dataset_function_that_makes_a_variable_is_refused_when_the_dataset_is_made():
    variable = psync.Variable

    def attribute(context):
        yield psync.Variable(np.zeros(2), name="v")

    def closed_over():
        return [variable(1.0)]

    def calls(context):
        return [declares() for _ in range(3)]

    class Batches:
        def __iter__(self):
            yield psync.api.variables.Variable(1.0)

    for dataset in (
        attribute, closed_over, calls, functools.partial(attribute), lambda: [declares()], Batches,
    ):  # fmt: skip
        for make in (per_worker, strategy_of().distribute_datasets_from_function):
            with pytest.raises(ConfigurationError, match=r"names psync\.Variable: "):
                make(dataset)


def test_what_elements_look_like_is_found_out_in_this_process():
    for dataset, spec in (
        (lambda: [np.zeros((2, 3)), np.zeros(3)], psync.TensorSpec(None, "float64")),
        (Loader([np.zeros(3), np.ones(3)]), psync.TensorSpec((3,), "float64")),
    ):
        assert per_worker(dataset).element_spec == spec


async def test_a_dataset_without_iterators_is_iterated_over_by_steps():
    async with coordinating(num_workers=1) as (_, coordinator):
        built = coordinator.create_per_worker_dataset(dataset_fn=lambda: [1, 2, 3]).build()
        assert await coordinator.schedule(lambda data: list(data), args=(built,)) == [1, 2, 3]


# --- positions --------------------------------------------------------------------------------


async def test_an_iterator_goes_on_from_the_positions_of_another_one():
    async with coordinating(num_workers=1) as (_, coordinator):
        per_worker = coordinator.create_per_worker_dataset(lambda: range(10))
        first = iter(per_worker)
        for _ in range(3):
            await coordinator.schedule(take, args=(first,))
        kept = json.loads(json.dumps(await first.positions()))
        assert kept == {"0": 3}
        again = per_worker.iterator(kept)
        assert await again.positions() == {0: 3}
        assert await coordinator.schedule(take, args=(again,)) == 3
        assert await again.positions() == {0: 4}
        captured = per_worker.iterator(7)
        assert await coordinator.schedule(lambda: next(captured)) == 7


@pytest.mark.virtual_time
@pytest.mark.parametrize("position", [0, 5])
async def test_after_its_worker_was_lost_an_iterator_starts_from_its_position(position):
    async with coordinating(num_workers=1) as (cluster, coordinator):
        per_worker = coordinator.create_per_worker_dataset(lambda: range(10))
        iterator = per_worker.iterator(position) if position else iter(per_worker)
        assert await coordinator.schedule(take, args=(iterator,)) == position
        assert await coordinator.schedule(take, args=(iterator,)) == position + 1
        await cluster.stop("worker-0")
        assert await iterator.positions() == {0: position}
        await cluster.start("worker-0")
        assert await coordinator.schedule(take, args=(iterator,)) == position


@for_each(
    "position, message",
    [
        *[
            (n, f"^position: expected a number of batches of at least 0, got {n}$")
            for n in (-1, 1.5)
        ],
        ({2: 1}, r"^position: expected workers 0 to 0, got 2\nhint: shards of"),
        ({"zero": 1}, r"got 'zero'"),
    ],
)
def test_what_is_no_position_is_refused(position, message):
    dataset = per_worker(lambda: range(10))
    with pytest.raises(ConfigurationError, match=message):
        dataset.iterator(position)


# --- what the program asks workers about iterators, and tells them ----------------------------


@pytest.mark.virtual_time
async def test_a_worker_that_is_lost_while_it_is_asked_is_where_it_began():
    async with coordinating(num_workers=1) as (cluster, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: range(10)))
        await coordinator.schedule(take, args=(iterator,))
        cluster.network.partition("chief-0", "worker-0")
        asked = asyncio.create_task(iterator.positions())
        await asyncio.sleep(1)
        assert not asked.done()
        cluster.network.cut("worker-0")
        assert await asked == {0: 0}


async def test_without_a_coordinator_nobody_knows_a_position_and_nothing_is_released():
    async with coordinating(num_workers=1) as (_, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
    with pytest.raises(ClosedError, match="positions: the coordinator is not running"):
        await iterator.positions()
    del iterator
    gc.collect()


async def test_an_iterator_that_the_coordinator_holds_does_not_keep_it():
    """What releases iterators is known to the interpreter; it would hold the coordinator, too."""
    async with coordinating(num_workers=1) as (_, coordinator):
        coordinator.held = iter(coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
        kept = weakref.ref(coordinator)
    del _, coordinator
    gc.collect()
    assert kept() is None
