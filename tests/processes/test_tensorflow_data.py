"""Datasets, ``fit`` and accumulators of TensorFlow's guide, on two real workers.

What docs/howto/tensorflow.md says of these names is run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from psync.errors import ConfigurationError, EndOfData
from shared_tasks import SharedTasks, on_each_worker, shared_tasks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

floats = partial(np.asarray, dtype=np.float32)  # travels to workers; a function of this file cannot


@pytest.fixture(scope="module")
def tasks() -> Iterator[SharedTasks]:
    with shared_tasks(2, 2) as running:
        yield running


def test_datasets_are_made_on_the_workers(tasks: SharedTasks) -> None:
    rows = np.arange(12)

    async def train(strategy: Any, coordinator: Any) -> None:
        with strategy.scope():
            arrived = psync.Variable(0)

        def dataset_fn(input_context: psync.InputContext) -> list[Any]:
            size = input_context.get_per_replica_batch_size(4)
            mine = rows[input_context.input_pipeline_id :: input_context.num_input_pipelines]
            told = (input_context.input_pipeline_id, input_context.num_replicas_in_sync, size)
            return [(told, mine[:3].tolist()), (told, mine[3:].tolist())]

        async def first(iterator: Any) -> Any:
            return next(iterator)

        async def several(iterator: Any, count: int) -> list[Any]:
            return [next(iterator) for _ in range(count)]

        shares = [[((0, 1, 4), [0, 2, 4]), ((0, 1, 4), [6, 8, 10])],
                  [((1, 1, 4), [1, 3, 5]), ((1, 1, 4), [7, 9, 11])]]  # fmt: skip
        for dataset in (
            coordinator.create_per_worker_dataset(dataset_fn),
            coordinator.create_per_worker_dataset(
                strategy.distribute_datasets_from_function(dataset_fn, psync.InputOptions())
            ),
            coordinator.create_per_worker_dataset(
                strategy.experimental_distribute_datasets_from_function(dataset_fn)
            ),
        ):
            iterator = iter(dataset)
            firsts = await on_each_worker(coordinator, arrived, first, iterator)
            assert firsts == [share[0] for share in shares]
            replicas = await strategy.run(first, args=(iterator,))
            assert strategy.experimental_local_results(replicas) == (shares[0][1], shares[1][1])
            iterator = iter(dataset)  # begins anew
            assert await on_each_worker(coordinator, arrived, several, iterator, 2) == shares

        arrays = strategy.experimental_make_numpy_dataset({"x": rows, "y": -rows})
        assert [element["x"] for element in arrays] == list(range(12))
        dataset = coordinator.create_per_worker_dataset(
            strategy.experimental_distribute_dataset(arrays)
        )
        assert dataset.element_spec["x"] == psync.TensorSpec((), "int64")
        stacked = strategy.experimental_make_numpy_dataset([rows, -rows])
        assert [element.tolist() for element in stacked] == [rows.tolist(), (-rows).tolist()]
        found = await on_each_worker(coordinator, arrived, several, iter(dataset), 6)
        xs = [[int(element["x"]) for element in share] for share in found]
        assert xs == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]

        iterator = iter(coordinator.create_per_worker_dataset(lambda: iter(["the only one"])))
        assert await on_each_worker(coordinator, arrived, first, iterator) == ["the only one"] * 2

        def batches(input_context: psync.InputContext) -> list[Any]:
            return [np.full((2, 3), input_context.input_pipeline_id, np.int32)] * 2

        async def iterates(dataset: Any) -> list[int]:
            return [int(batch.sum()) for batch in dataset]

        distributed = strategy.distribute_datasets_from_function(batches)
        assert distributed.element_spec == psync.TensorSpec((2, 3), "int32")
        built = coordinator.create_per_worker_dataset(batches).build()
        for share in (distributed, built):
            sums = await on_each_worker(coordinator, arrived, iterates, share)
            assert sums == [[0, 0], [6, 6]]

        ends = [coordinator.schedule(first, args=(iterator,)) for _ in range(4)]
        others = [coordinator.schedule(several, args=(iterator, 0)) for _ in range(4)]
        with pytest.raises(EndOfData):
            await coordinator.join()
        assert await coordinator.fetch(others) == [[]] * 4  # nothing was cancelled
        with pytest.raises(EndOfData):
            await ends[0]

    tasks.train(train)


def test_fit_needs_steps_per_epoch_and_calls_callbacks(tasks: SharedTasks, tmp_path: Path) -> None:
    def dataset_fn(input_context: psync.InputContext) -> Iterator[Any]:
        rng = np.random.default_rng(input_context.input_pipeline_id)
        while True:
            x = floats(rng.normal(size=(16, 2)))
            yield x, x @ floats([2, -1])

    def value_and_grad(w: Any, batch: Any) -> Any:
        x, y = batch
        error = x @ w - y
        return np.mean(error**2), 2 * x.T @ error / len(x), x @ w

    async def train(strategy: Any, coordinator: Any) -> None:
        with strategy.scope():
            w = psync.Variable(np.zeros(2, np.float32), name="w")
            mse = psync.metrics.MeanSquaredError("mse")
            other = psync.Variable(np.zeros(2, np.float32))
        optimizer = psync.optimizers.RMSprop(0.1)
        trainer = psync.Trainer(strategy, w, value_and_grad, optimizer, [mse])
        saved = psync.callbacks.ModelCheckpoint(tmp_path)
        history = await trainer.fit(
            dataset_fn, epochs=4, steps_per_epoch=20, steps_per_execution=5, callbacks=[saved],
            validation_data=(np.eye(2, dtype=np.float32), floats([2, -1])), verbose=False,
        )  # fmt: skip
        assert history.epoch == [0, 1, 2, 3]
        assert history.history["loss"][-1] < 0.1 * history.history["loss"][0]
        assert history.history["val_mse"][-1] < 0.1
        assert saved.manager is not None
        assert len(saved.manager.checkpoints) == 4
        assert await optimizer.iterations.read() == 80
        synchronous = psync.SyncReplicasOptimizer(
            psync.optimizers.SGD(0.1), 2
        )  # as of an Estimator
        trainer = psync.Trainer(strategy, other, value_and_grad, synchronous)
        history = await trainer.fit(dataset_fn, epochs=2, steps_per_epoch=40, verbose=False)
        assert history.history["loss"][-1] < 0.1 * history.history["loss"][0]
        with strategy.scope():
            assert await psync.get_or_create_global_step().read() == 40  # of two gradients each
        for value in (0, None):
            with pytest.raises(ConfigurationError, match="steps_per_epoch above 0"):
                await trainer.fit(dataset_fn, epochs=1, steps_per_epoch=value)

    tasks.train(train)


# --- accumulators ------------------------------------------------------------------------------
