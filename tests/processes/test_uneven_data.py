"""Workers that have different numbers of batches, one of which is killed: all are trained.

Everything here is a real process.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from psync.errors import EndOfData
from real_training import ONE_LOOP, training

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]

BATCHES = (5, 40)  # of each worker
FATAL = 20  # worker 1 kills itself with this one, once


@pytest.mark.promise("data.all-batches", "data.lost-worker-restarts")
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("killed", [False, True])
async def test_all_batches_are_trained_on_though_a_worker_is_killed(
    killed: bool, synchronous: bool, tmp_path: Path
) -> None:
    mark = tmp_path / "killed"

    def dataset(context: psync.InputContext) -> range:
        worker = context.input_pipeline_id
        return range(BATCHES[0] * worker, BATCHES[0] * worker + BATCHES[worker])

    async with training(2, 2) as (_, strategy, coordinator):
        with strategy.scope():
            trained = psync.Variable(np.zeros((sum(BATCHES), 2), np.float32))
            global_step = psync.get_or_create_global_step() if synchronous else None
        optimizer: Any = psync.optimizers.SGD(1.0)
        if synchronous:
            optimizer = psync.SyncReplicasOptimizer(optimizer, 2, reduction="sum")

        async def step(data: Any) -> psync.PushResult:
            gradient = np.zeros_like(await trained.read())
            batch = next(data)
            gradient[batch] = -1
            if killed and batch == FATAL and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return await optimizer.apply_gradients([(gradient, trained)], global_step)

        data = iter(coordinator.create_per_worker_dataset(dataset))
        values = [coordinator.schedule(step, (data,)) for _ in range(sum(BATCHES))]
        await coordinator.join()
        outcomes = [result.outcome for result in await coordinator.fetch(values)]
        stale = outcomes.count(psync.Outcome.STALE)  # where the worker was lost in a step
        assert stale <= 2 * (killed and synchronous)
        counts = (await trained.read())[:, 0]
        assert counts.sum() == sum(BATCHES) - stale
        assert counts[: BATCHES[0]].max() == 1
        assert counts.max() == 1 + killed  # it reads its data from the beginning
        if not killed:
            coordinator.schedule(step, (data,))
            with pytest.raises(EndOfData, match=r"task:0 had 5, /job:worker/task:1 had 40\)"):
                await coordinator.join()
        assert mark.exists() == killed


async def test_the_data_of_a_worker_that_is_given_up_are_not_waited_for() -> None:
    async with training(1, 2, max_restarts=0) as (_, _, coordinator):

        async def step(data: Any) -> int:
            batch: int = next(data)
            if psync.get_worker_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return batch

        data = iter(coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
        for _ in range(6):
            coordinator.schedule(step, (data,))
        with pytest.raises(EndOfData, match=r"on any worker \(/job:worker/task:0 had 3\)"):
            await coordinator.join()
        assert coordinator.statistics()["closures"].finished == 3
