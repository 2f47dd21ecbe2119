"""ParameterServerStrategy and ClusterCoordinator as TensorFlow's guide shows them, on real tasks.

What docs/howto/tensorflow.md says of these names is run here. There are three ps tasks, as in the
guide's example of placement, and two workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from psync.errors import (
    ClosureCancelled,
    ClosureInputError,
    DeadlineExceeded,
    SerializationError,
    UsageError,
)
from shared_tasks import SharedTasks, on_each_worker, shared_tasks, trains

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PS = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(3)]


@pytest.fixture(scope="module")
def tasks() -> Iterator[SharedTasks]:
    with shared_tasks(3, 2) as running:
        yield running


floats = partial(np.asarray, dtype=np.float32)  # travels to workers; a function of this file cannot


# --- the custom training loop ------------------------------------------------------------------

STEPS_PER_EPOCH = 4


def test_the_custom_training_loop_and_its_resumption(tasks: SharedTasks, tmp_path: Path) -> None:
    """The loop of the guide, line by line; then a new program goes on where this one was."""

    async def train(
        strategy: psync.ParameterServerStrategy, coordinator: psync.ClusterCoordinator
    ) -> list[int]:
        class Model(psync.Module):
            def __init__(self) -> None:
                self.w = psync.Variable(np.zeros((4, 2), np.float32), name="w")

        def dataset_fn() -> Iterator[Any]:  # without an argument
            while True:
                yield np.full((8, 2), 2, np.float32), np.ones(8, np.float32)

        distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn)
        with strategy.scope():
            model = Model()
            optimizer = psync.optimizers.Momentum(0.5, momentum=0.5)
            metrics = psync.metrics.Mean("loss")
        checkpoint = psync.Checkpoint(model=model, optimizer=optimizer)
        manager = psync.CheckpointManager(checkpoint, tmp_path, max_to_keep=2)

        async def load_checkpoint(manager: psync.CheckpointManager) -> int | None:
            if await manager.restore_or_initialize() is None:
                return None
            return int(await optimizer.iterations.read()) // STEPS_PER_EPOCH

        initial_epoch = await load_checkpoint(manager) or 0

        async def worker_fn(iterator: Any) -> None:
            async def replica_fn(inputs: Any) -> Any:
                batch_data, labels = inputs
                gradient = np.broadcast_to(batch_data.mean(axis=0), model.w.shape)
                await optimizer.apply_gradients([(floats(gradient), model.w)])
                await metrics.update_state(labels)
                return len(labels)

            assert await psync.get_strategy().run(replica_fn, args=(next(iterator),)) == 8

        epochs = []
        for epoch in range(initial_epoch, initial_epoch + 2):
            distributed_iterator = iter(distributed_dataset)
            for _ in range(STEPS_PER_EPOCH):
                coordinator.schedule(worker_fn, args=(distributed_iterator,))
            await coordinator.join()
            assert coordinator.done()
            assert await metrics.result() == 1.0
            await manager.save()
            epochs.append(epoch)
        steps = (epochs[-1] + 1) * STEPS_PER_EPOCH
        assert await optimizer.iterations.read() == steps
        value = momentum = 0.0
        for _ in range(steps):
            momentum = 0.5 * momentum - 0.5 * 2
            value += momentum
        np.testing.assert_allclose(await model.w.read(), np.full((4, 2), value), rtol=1e-6)
        assert len(manager.checkpoints) == 2
        return epochs

    assert tasks.train(train, psync.FixedShardsPartitioner(2)) == [0, 1]
    assert tasks.train(train, psync.FixedShardsPartitioner(3)) == [2, 3]  # cut otherwise
    assert tasks.train(train) == [4, 5]


def test_the_strategy_stays_with_the_coordinator(tasks: SharedTasks) -> None:
    async def train(strategy: Any, coordinator: Any) -> None:
        assert psync.ClusterCoordinator(strategy) is coordinator
        assert strategy.cluster_resolver is tasks.resolver
        assert strategy.cluster_resolver.task_type == "chief"
        assert strategy.cluster_resolver.cluster_spec().num_tasks("worker") == 2
        assert strategy.num_replicas_in_sync == 1

        async def captures() -> int:
            return int(strategy.num_replicas_in_sync)

        async def asks() -> tuple[int, bool, int]:
            inside = psync.get_strategy()
            return inside.num_replicas_in_sync, psync.has_strategy(), psync.get_worker_index()

        with pytest.raises(SerializationError, match="the strategy lives on the coordinator"):
            coordinator.schedule(captures)
        with strategy.scope():
            arrived = psync.Variable(0)
        found = await on_each_worker(coordinator, arrived, asks)
        assert found == [(1, True, 0), (1, True, 1)]
        with pytest.raises(UsageError):
            psync.get_worker_index()

    tasks.train(train)


@trains()
async def test_schedule_returns_at_once_and_values_are_fetched_in_their_nesting(
    strategy: Any, coordinator: Any
) -> None:
    with strategy.scope():
        v = psync.Variable(np.zeros(3, np.float32))

    async def fn(x: int, *, y: int) -> dict[str, Any]:
        await v.assign_add(np.ones(3, np.float32))
        return {"sum": x + y}

    def plain(x: int) -> int:  # in a thread of the worker
        return int(psync.wait(v.read())[0]) * 0 + x

    values = [coordinator.schedule(fn, args=(i,), kwargs={"y": 10}) for i in range(4)]
    assert not coordinator.done()
    assert not any(value.done() for value in values)
    await coordinator.join()
    assert await coordinator.fetch({"all": values, "other": 7}) == {
        "all": [{"sum": 10 + i} for i in range(4)], "other": 7,
    }  # fmt: skip
    assert (await v.read()).tolist() == [4, 4, 4]
    assert await values[3].fetch() == await values[3] == {"sum": 13}
    assert await coordinator.schedule(plain, args=(5,)) == 5
    later = coordinator.schedule(
        fn, args=(coordinator.schedule(plain, args=(1,)),), kwargs={"y": 1}
    )
    assert await later == {"sum": 2}

    async def fails() -> None:
        raise KeyError("of the step")

    for _ in range(3):
        coordinator.schedule(fails)
    with pytest.raises(KeyError, match="of the step"):
        await coordinator.join()
    await coordinator.join()  # raised once


@trains()
async def test_errors_have_types_of_their_own(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        go_on = psync.Variable(False)

    async def waits() -> None:
        while not await go_on.read():
            pass

    async def fails() -> None:
        raise KeyError("of the step")

    def dataset_fn() -> None:
        raise OSError("no such file")

    async def first(iterator: Any) -> Any:
        return next(iterator)

    waiting = coordinator.schedule(waits)
    with pytest.raises(DeadlineExceeded):  # what is scheduled goes on
        await coordinator.join(timeout=0.1)
    coordinator.schedule(fails)
    with pytest.raises(KeyError, match="of the step"):
        await coordinator.join()
    with pytest.raises(ClosureCancelled):
        await waiting
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    with pytest.raises(ClosureInputError) as caught:
        await coordinator.schedule(first, args=(iterator,))
    assert isinstance(caught.value.__cause__, OSError)


# --- variables ---------------------------------------------------------------------------------


@trains()
async def test_variables_of_the_scope_go_to_one_ps_after_the_other(
    strategy: Any, coordinator: Any
) -> None:
    with pytest.raises(UsageError, match="outside a strategy's scope"):
        psync.Variable(initial_value=0.0)
    with strategy.scope():
        v2 = psync.Variable(initial_value=1.0)
        v3 = psync.Variable(initial_value=2.0)
        v4 = psync.Variable(initial_value=3.0)
        v5 = psync.Variable(initial_value=4.0)
        with strategy.pinned(2), strategy.pinned("/job:ps/task:1"):
            assert psync.Variable(5.0).device == PS[1]  # takes nobody's turn
    assert v2.device == "/job:ps/replica:0/task:0/device:CPU:0"
    assert v3.device == "/job:ps/replica:0/task:1/device:CPU:0"
    assert v4.device == "/job:ps/replica:0/task:2/device:CPU:0"
    assert v5.device == "/job:ps/replica:0/task:0/device:CPU:0"

    async def reads() -> tuple[list[str], list[float]]:
        values = await psync.pull([v2, v3, v4, v5])
        await v5.assign_sub(1.0)
        return [v.device for v in (v2, v3, v4, v5)], [float(value) for value in values]

    places = [PS[0], PS[1], PS[2], PS[0]]
    assert await coordinator.schedule(reads) == (places, [1, 2, 3, 4])
    assert await v5.read() == await v5.read_value() == await v5.value() == 3
    held = [ps["store"]["shards"] for ps in await coordinator.ps_statistics()]
    assert held == [2, 2, 1]
    assert strategy.extended.parameter_devices == tuple(PS)
    worker = "/job:worker/replica:0/task:{}/device:CPU:0"
    assert strategy.extended.worker_devices == (worker.format(0), worker.format(1))


def test_the_dense_layer_of_two_shards(tasks: SharedTasks, tmp_path: Path) -> None:
    kernel = np.arange(1000, dtype=np.float32).reshape(100, 10)

    async def train(strategy: Any, coordinator: Any) -> None:
        class Dense(psync.Module):
            def __init__(self, name: str | None = None) -> None:
                super().__init__(name)
                self.w = psync.Variable(kernel, name="w")
                self.calls = psync.Variable(0, name="calls", trainable=False)

            async def __call__(self, x: Any) -> Any:
                return x * await self.w.read()

        with strategy.scope():
            dense = Dense()
            arrived = psync.Variable(0)
        calls, *shards = dense.variables  # in the order of the attributes' names
        assert dense.trainable_variables == tuple(shards) == tuple(dense.w.variables)
        assert calls is dense.calls
        assert len(dense.w.variables) == 2
        assert isinstance(dense.w, psync.ShardedVariable)
        assert all(isinstance(shard, psync.Variable) for shard in shards)
        assert [shard.shape for shard in shards] == [(50, 10), (50, 10)]
        assert [shard.name for shard in shards] == ["w/part_0", "w/part_1"]
        assert dense.w.device == (PS[0], PS[1])
        assert (dense.name, dense.w.name, dense.w.shape) == ("dense", "w", (100, 10))
        optimizer = psync.optimizers.SGD(1.0)

        async def step() -> tuple[Any, ...]:
            try:
                2.0 * dense.w  # in TensorFlow this pulls the whole variable
            except UsageError as exc:
                hint = str(exc)
            doubled = await dense(2.0)
            rows = await psync.embedding_lookup(dense.w, [[99, 0], [50, 99]])
            some = await dense.w[48:52:2]
            read = await dense.w.sparse_read([51, 3])
            return hint, doubled, rows, some, read

        for hint, doubled, rows, some, read in await on_each_worker(coordinator, arrived, step):
            assert "operator *" in hint
            assert "await" in hint
            np.testing.assert_array_equal(doubled, 2 * kernel)
            np.testing.assert_array_equal(rows, kernel[[[99, 0], [50, 99]]])
            np.testing.assert_array_equal(some, kernel[48:52:2])
            np.testing.assert_array_equal(read, kernel[[51, 3]])

        async def trains(targets: Any) -> None:
            gradients = [np.ones(target.shape, np.float32) for target in targets]
            await optimizer.apply_gradients(zip(gradients, targets, strict=True))

        await on_each_worker(coordinator, arrived, trains, list(shards))  # as tf.GradientTape needs
        await on_each_worker(coordinator, arrived, trains, [dense.w])  # and as a whole
        np.testing.assert_array_equal(await dense.w.read(), kernel - 4)
        await dense.w.assign(kernel)
        path = await psync.Checkpoint(dense=dense).save(tmp_path)
        manifest = json.loads((path / "manifest.json").read_text())
        saved = {tensor["name"]: tensor["shape"] for tensor in manifest["tensors"]}
        assert saved == {"dense/w": [100, 10], "dense/calls": []}  # one array, however it is cut

    tasks.train(train, variable_partitioner=psync.FixedShardsPartitioner(num_shards=2))

    async def restore(strategy: Any, coordinator: Any) -> None:
        with strategy.scope():
            w = psync.Variable(np.zeros((100, 10), np.float32), name="w")
        await psync.Checkpoint(**{"dense": {"w": w}}).restore(psync.latest_checkpoint(tmp_path))
        np.testing.assert_array_equal(await w.read(), kernel)
        assert len(w.variables) == 3

    tasks.train(restore, variable_partitioner=psync.FixedShardsPartitioner(num_shards=3))


@trains()
async def test_three_plus_replica_id(distribution: Any, coordinator: Any) -> None:
    """The example of ``call_for_each_replica``, and its other two names."""

    def merge_fn(distribution: Any, three_plus_replica_id: Any) -> Any:
        return sum(distribution.experimental_local_results(three_plus_replica_id))

    async def fn(three: int) -> int:
        replica_ctx = psync.get_replica_context()
        assert replica_ctx is not None
        v = three + replica_ctx.replica_id_in_sync_group
        s = await replica_ctx.merge_call(merge_fn, args=(v,))
        return int(s + v)

    with distribution.scope():
        for run in (
            distribution.run,
            distribution.experimental_run_v2,
            distribution.extended.call_for_each_replica,
        ):
            merged_results = await run(fn, args=[3])
            assert isinstance(merged_results, psync.PerReplica)
            assert distribution.experimental_local_results(merged_results) == (10, 11)
