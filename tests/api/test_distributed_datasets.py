"""Distributed datasets: each worker has its share, and the coordinator has none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from memory_cluster import MemoryCluster, coordinating
from psync import InputOptions
from psync.errors import ConfigurationError, UsageError


def strategy_of(workers: Any = ("w0:1", "w1:1"), *, worker: int | None = None) -> Any:
    cluster = psync.ClusterSpec({"chief": ["c:1"], "ps": ["p:1"], "worker": workers})
    job, index = ("chief", 0) if worker is None else ("worker", worker)
    resolver = psync.SimpleClusterResolver(cluster, task_type=job, task_id=index)
    return psync.ParameterServerStrategy(resolver)


async def take(batches: Any) -> Any:
    """A step that says whose batch it got."""
    return psync.get_worker_index(), next(batches)


async def shares(coordinator: psync.ClusterCoordinator, dataset: Any) -> dict[int, list[Any]]:
    """What each of two workers gets until its data is over."""
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    found: dict[int, list[Any]] = {0: [], 1: []}

    async def all_of(batches: Any) -> Any:
        await memory_cluster.note(f"worker {psync.get_worker_index()}")
        for index in range(2):  # each of them runs one of the two steps
            await memory_cluster.event_of(f"worker {index}").wait()
        return psync.get_worker_index(), [batch for batch in _until_the_end(batches)]

    for worker, batches in await coordinator.fetch(
        [coordinator.schedule(all_of, args=(iterator,)) for _ in range(2)]
    ):
        found[worker] += batches
    return found


def _until_the_end(batches: Any) -> Any:
    while True:
        try:
            yield next(batches)
        except psync.EndOfData:
            return


def rows_of_arrays(strategy: Any) -> Any:
    arrays = {"x": np.arange(6).reshape(3, 2), "y": np.arange(3)}
    dataset = strategy.experimental_make_numpy_dataset(arrays)
    assert [row["y"] for row in dataset] == [0, 1, 2]
    return strategy.experimental_distribute_dataset(dataset)


def told(context: Any) -> Any:
    size = context.get_per_replica_batch_size(4)
    return [(context.input_pipeline_id, context.num_input_pipelines, size)]


@pytest.mark.parametrize(
    ("distribute", "shares_of_both"),
    [
        (
            lambda strategy: strategy.experimental_distribute_dataset([1, 2, 3, 4, 5]),
            {0: [1, 3, 5], 1: [2, 4]},
        ),
        (
            rows_of_arrays,
            {0: [{"x": [0, 1], "y": 0}, {"x": [4, 5], "y": 2}], 1: [{"x": [2, 3], "y": 1}]},
        ),
        (
            lambda strategy: strategy.distribute_datasets_from_function(told),
            {0: [(0, 2, 4)], 1: [(1, 2, 4)]},
        ),
        (
            lambda strategy: strategy.experimental_distribute_datasets_from_function(told),
            {0: [(0, 2, 4)], 1: [(1, 2, 4)]},
        ),
    ],
    ids=["elements", "rows of arrays", "a function", "a function, by its older name"],
)
async def test_each_worker_gets_its_share(distribute: Any, shares_of_both: Any) -> None:
    async with coordinating(num_workers=2) as (_, coordinator):
        found = await shares(coordinator, distribute(coordinator.strategy))
        np.testing.assert_equal(found, shares_of_both)


async def test_files_are_dealt_to_the_workers(tmp_path: Path):
    files = []
    for index in range(3):
        files.append(tmp_path / f"{index}.txt")
        files[-1].write_text("ab" if index else "c")

    def read(file):
        return list(file.read_text())

    async with coordinating(num_workers=2) as (_, coordinator):
        strategy = coordinator.strategy
        whole = psync.data.from_files(files, read)
        dataset = strategy.experimental_distribute_dataset(whole)
        assert await shares(coordinator, dataset) == {0: ["c", "a", "b"], 1: ["a", "b"]}
        options = InputOptions(shard_policy="off")
        memory_cluster.shared.clear()
        dataset = strategy.experimental_distribute_dataset(whole, options)
        assert await shares(coordinator, dataset) == {0: list("cabab"), 1: list("cabab")}


async def test_a_step_may_iterate_over_its_share_itself():
    async with coordinating(num_workers=1) as (_, coordinator):
        dataset = coordinator.strategy.experimental_distribute_dataset([1, 2, 3])

        def step(dataset):
            return sum(dataset), list(dataset)

        assert await coordinator.schedule(step, args=(dataset,)) == (6, [1, 2, 3])

        def forbidden():
            psync.get_or_create_global_step()
            return []

        dataset = coordinator.strategy.distribute_datasets_from_function(forbidden)
        with pytest.raises(UsageError, match="in dataset code, which must not call psync"):
            await coordinator.schedule(step, args=(dataset,))


def test_on_the_coordinator_it_cannot_be_iterated_over() -> None:
    dataset = strategy_of().experimental_distribute_dataset([1, 2])
    with pytest.raises(ValueError, match="iter") as caught:
        iter(dataset)
    assert str(caught.value) == (
        "iter() on a distributed dataset on the coordinator: only workers read its elements\nhint: "
        "pass iter(coordinator.create_per_worker_dataset(dataset)) to steps"
    )


def test_a_worker_that_trains_by_itself_iterates_over_its_share() -> None:
    for worker, share in enumerate([["a", "c"], ["b"]]):
        dataset = strategy_of(worker=worker).experimental_distribute_dataset(["a", "b", "c"])
        assert list(dataset) == list(dataset) == share
    strategy = strategy_of({1: "a:1", 4: "b:1"}, worker=4)  # numbered with gaps
    assert list(strategy.experimental_distribute_dataset([1, 2, 3])) == [2]


async def test_pipelines_are_counted_from_zero_whatever_the_workers_are_called():
    cluster = MemoryCluster(1, 0)
    memory_cluster.shared.clear()
    for name in ("ps-0", "worker-1", "worker-3"):
        await cluster.start(name)
    spec = {"chief": ["chief-0:1"], "ps": ["ps-0:1"], "worker": {1: "worker-1:1", 3: "worker-3:1"}}
    resolver = psync.SimpleClusterResolver(psync.ClusterSpec(spec), task_type="chief", task_id=0)
    resolver.platform = cluster.platform(host="chief-0")
    strategy = psync.ParameterServerStrategy(resolver)
    async with psync.ClusterCoordinator(strategy) as coordinator:

        def dataset_fn(context):
            while True:
                yield context.input_pipeline_id, psync.get_worker_index()

        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        values = [coordinator.schedule(take, args=(iterator,)) for _ in range(8)]
        counts: Counter[int] = Counter()
        for worker, batch in await coordinator.fetch(values):
            assert batch == (worker, worker)
            counts[worker] += 1
        assert await iterator.positions() == {0: counts[0], 1: counts[1]}
    await cluster.stop_all()


# --- what elements look like ------------------------------------------------------------------


def test_the_spec_is_taken_from_the_elements_and_asks_for_no_more_than_two() -> None:
    def dataset_fn(context: psync.InputContext) -> Any:
        assert (context.num_input_pipelines, context.input_pipeline_id) == (2, 0)
        yield {"x": np.zeros((4, 3), np.float32)}
        yield {"x": np.zeros((2, 3), np.float32)}
        raise AssertionError("nobody needs a third one")

    strategy = strategy_of()
    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    assert dataset.element_spec == {"x": psync.TensorSpec((None, 3), "float32")}
    arrays = psync.data.from_arrays(np.zeros((5, 3)), batch_size=5)
    assert strategy.experimental_distribute_dataset(arrays).element_spec == psync.TensorSpec(
        (5, 3), "float64"
    )
    assert strategy.distribute_datasets_from_function(list).element_spec is None


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            lambda: [1],
            r"got a function\nhint: for a function use "
            r"distribute_datasets_from_function",
        ),
        (list, r"got a type\nhint: for a function use distribute_datasets_from_function"),
        ((n for n in [1]), "a generator can be iterated over only once"),
        (np.zeros(3), r"got an array\nhint: psync.data.from_arrays"),
        (None, "^dataset: expected an iterable of batches, got NoneType$"),
    ],
)
def test_what_cannot_be_distributed_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        strategy_of().experimental_distribute_dataset(dataset)


def test_what_is_distributed_already_is_refused() -> None:
    strategy = strategy_of()
    dataset = strategy.experimental_distribute_dataset([1])
    assert repr(dataset).endswith("for 2 workers>")
    with pytest.raises(UsageError, match=r"got one that is already distributed"):
        strategy.experimental_distribute_dataset(dataset)


def test_options_say_what_is_possible() -> None:
    strategy = strategy_of()
    with pytest.raises(
        ConfigurationError, match=r"^shard_policy: expected one of auto, file, data"
    ):
        InputOptions("hint")
    with pytest.raises(ConfigurationError, match=r"options: expected InputOptions, got str$"):
        strategy.experimental_distribute_dataset([1], "file")
    with pytest.raises(ConfigurationError, match=r'^shard_policy "file": expected at least'):
        strategy.experimental_distribute_dataset([1], InputOptions("file"))
    with pytest.raises(
        ConfigurationError, match=r'expected "auto" or "off" .* got "data"\nhint: l'
    ):
        strategy.distribute_datasets_from_function(list, InputOptions("data"))
    with pytest.raises(UsageError, match="needs the arguments a, b"):
        strategy.distribute_datasets_from_function(lambda a, b: [])
