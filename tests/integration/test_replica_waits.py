"""A chief attaches while a step is under way, or with another number of ps tasks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import psync
from chief_lives import backing_one_another_up, life, silence
from local_training import in_step
from memory_cluster import MemoryCluster, cluster_of, until
from psync.testing import settle
from psync.testing.seams import fresh_process
from psync.wire.messages import CloseStep
from replica_training import LARGE, SMALL, StepsTraining

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("step_ps", [0, 1])
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_a_step_that_is_under_way_when_ps_0_is_attached_is_counted(
    size: int, step_ps: int
) -> None:
    with fresh_process():
        async with backing_one_another_up() as cluster:
            async with life(cluster) as first:
                training = StepsTraining(first, size, step_ps)
                training.schedule(6)
                await first.join()
                go_on = asyncio.Event()
                with cluster.tap("ps-1").at(CloseStep, go_on.wait) as came:
                    training.schedule(40)
                    await came.wait()
                    silence(cluster, first)
                    attaching = asyncio.create_task(attached(cluster, go_on))
                    async with life(cluster) as second:
                        await attaching
                        training = StepsTraining(second, size, step_ps)
                        assert await training.check() == 4


async def attached(cluster: MemoryCluster, go_on: asyncio.Event) -> None:
    """Let what was held up go on once ps 0 serves the next chief."""
    ps_0 = cluster.ps("ps-0")
    (before, *_) = ps_0.describe()
    await until(lambda: ps_0.describe()[0] != before)
    await settle()
    go_on.set()


@pytest.mark.parametrize("num_ps", [1, 3])
async def test_a_chief_of_another_number_of_ps_tasks_may_come(num_ps: int) -> None:
    """Ps 0 is connected to the other ones that there were."""
    async with cluster_of(2, 1) as cluster:
        for count in (2, num_ps):
            cluster.counts["ps"] = count
            if count == 3:
                await cluster.start("ps-2")
            strategy = cluster.strategy(psync.FixedShardsPartitioner(2))
            async with psync.ClusterCoordinator(strategy) as coordinator:
                with strategy.scope():
                    w = psync.Variable(np.zeros(2, np.float32), name="w")
                    step = psync.get_or_create_global_step()
                optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 1, 1)

                async def push(w: psync.Variable = w, optimizer=optimizer, step=step) -> None:  # type: ignore[no-untyped-def]
                    await optimizer.apply_gradients([(np.ones(2, np.float32), w)], step)

                await in_step(coordinator, push)
                assert (await w.read()).tolist() == [-1, -1]
