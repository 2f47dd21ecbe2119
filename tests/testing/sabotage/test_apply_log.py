"""What a ps has applied, written down: the same calls on an empty store give the same bits."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memory_cluster
import psync
from inside import store_of
from memory_cluster import cluster_of
from psync.specs import ShardSpec
from psync.store.rows import RowTable
from psync.store.shards import ShardTable
from psync.store.store import ShardStore
from psync.testing.chaos.replay import replay
from psync.testing.sabotage import SabotagedParts
from psync.testing.sabotage.apply_log import LOGGED, ApplyLog, LoggedStore, digest, read_log

SPEC = ShardSpec("w", 0, 0, 0, (2, 3), "float32", 0)


def logged(directory: Path) -> tuple[ApplyLog, ShardStore]:
    log, store = ApplyLog(str(directory)), LoggedStore("here")
    log.adopt(store)
    return log, store


def log_of(directory: Path) -> Path:
    return directory / f"ps-0.{os.getpid()}.applies"


def test_every_method_that_changes_a_store_is_written_down() -> None:
    """A new one has to be added to the list, or to those that read."""
    reading = {
        "check_apply", "check_apply_rows", "check_assign", "check_average", "check_optimizable",
        "check_rate", "check_row_numbers", "check_rows", "check_scatter", "check_slot",
        "check_idle", "iterations", "keys", "mean_of", "measure", "num_updates",
        "push_count",
        "read", "read_range", "read_together", "read_rows", "read_slot", "row_bytes", "rows_cost",
        "rule", "shards", "spec", "square_mean", "square_row_mean", "statistics", "pool", "busy",
        "version",
    }  # fmt: skip
    through_others = {"apply", "assign"}  # they call one that is written down
    # Who served it is gone, of the third; errors of rules are made again when it is replayed.
    of_its_own = {"take_up", "take_up_optimizer", "release", "take_failure", "make_slot"}
    public = {
        name
        for table in (ShardStore, RowTable, ShardTable)
        for name in vars(table)
        if not name.startswith("_")
    }
    assert public - set(LOGGED) - reading - through_others - of_its_own == set()


def test_calls_come_back_as_they_were_made(tmp_path: Path) -> None:
    log, store = logged(tmp_path)
    store.create(SPEC, np.arange(6, dtype=np.float32).reshape(2, 3).data)
    for _ in store.assign(SPEC.key, "add", np.ones((2, 3), np.float32)):
        pass
    with pytest.raises(psync.PsyncError):  # what is refused has changed nothing
        store.assign(SPEC.key, "mul", np.ones((2, 3), np.float32))  # type: ignore[arg-type]
    store.define_optimizer(1, psync.optimizers.SGD(0.1).get_config())
    mean = store.mean_of([np.ones(6, np.float32)] * 2, [1.0, 3.0], scale=0.5)
    store.apply_checked(1, SPEC.key, mean, 0).close()
    log.cut(store)
    names = [name for name, _, _ in read_log(log_of(tmp_path))]
    assert names[1:-1] == ["create", "assign_checked", "define_optimizer", "apply_checked"]
    *_, (_, (found,), _) = read_log(log_of(tmp_path))
    assert found == digest(store)
    replayed = replay(log_of(tmp_path))
    assert replayed.faults == []
    assert digest(replayed.store) == digest(store)
    log.close()


def test_a_record_that_was_cut_off_is_none(tmp_path: Path) -> None:
    log, store = logged(tmp_path)
    store.create(SPEC, fill=np.float32(3))
    log.close()
    path = log_of(tmp_path)
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 20, 2):
        path.write_bytes(whole[:length])
        assert [name for name, _, _ in read_log(path)] == (["begin"] if length > 10 else [])


async def train(coordinator: psync.ClusterCoordinator) -> dict[str, np.ndarray]:
    """Everything that changes a store, a little of it."""
    strategy = coordinator.strategy
    with strategy.scope():
        rng = np.random.default_rng(3)
        w = psync.Variable(rng.normal(size=(6, 3)).astype(np.float32), name="w")
        v = psync.Variable(np.ones(4, np.float32), name="v")
        table = psync.Variable(np.zeros((64, 2), np.float32), name="table")
        counter = psync.Variable(0, name="counter")
        step_number = psync.get_or_create_global_step()
        average = psync.ExponentialMovingAverage(0.5)
        average.apply([v])
    adam, sgd = psync.optimizers.Adam(0.1), psync.optimizers.SGD(0.5, momentum=0.9)
    together = psync.SyncReplicasOptimizer(psync.optimizers.SGD(0.25), 2)

    async def step(number: int) -> None:
        values = await w.read()
        rows = psync.IndexedSlices(np.full((2, 2), number, np.float32), [number, number + 32])
        await adam.apply_gradients([(values * number, w), (rows, table)])
        await sgd.apply_gradients([(np.full(4, 0.1, np.float32), v)])
        await counter.assign_add(number)
        await table.scatter_mul(psync.IndexedSlices(np.full((1, 2), 3, np.float32), [number]))
        await v.read()
        await together.apply_gradients([(np.full(4, number, np.float32), v)], step_number)

    for number in range(8):
        coordinator.schedule(step, (number,))
    await coordinator.join()
    await average.update()
    await adam.set_learning_rate(0.01)
    names = ("w", "v", "table", "counter")
    return dict(zip(names, await psync.pull((w, v, table, counter)), strict=True))


@pytest.mark.parametrize("num_ps", [1, 2])
async def test_a_training_is_replayed_bit_for_bit(
    num_ps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = memory_cluster.MemoryCluster.platform

    def platform(self: Any, *args: Any, **options: Any) -> Any:
        return dataclasses.replace(
            plain(self, *args, **options), parts=SabotagedParts(apply_log=str(tmp_path))
        )

    monkeypatch.setattr(memory_cluster.MemoryCluster, "platform", platform)
    partitioner = psync.FixedShardsPartitioner(num_ps)
    async with cluster_of(num_ps, 2) as cluster:
        async with psync.ClusterCoordinator(cluster.strategy(partitioner)) as coordinator:
            found = await train(coordinator)
        stores = {name: store_of(task) for name, task in cluster.tasks.items() if name[0] == "p"}
    assert all(isinstance(store, LoggedStore) for store in stores.values())
    for name, store in stores.items():
        (path,) = tmp_path.glob(f"{name}.*.applies")
        replayed = replay(path)
        assert replayed.faults == []
        assert digest(replayed.store) == digest(store)
        assert replayed.updates > 8
    assert found["counter"] == 28
