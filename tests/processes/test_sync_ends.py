"""Synchronous training that comes to an end: odd numbers, too little data, too few workers."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psync
from psync import Outcome
from psync.errors import EndOfData, NotEnoughReplicas
from real_training import ONE_LOOP, assert_nothing_is_staged, group_of, training

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]


def declared(
    strategy: psync.ParameterServerStrategy, rows: int, **options: Any
) -> tuple[psync.Variable, psync.Variable, psync.SyncReplicasOptimizer]:
    """A variable that sums what two replicas push, the global step, and their optimizer."""
    with strategy.scope():
        sums = psync.Variable(np.zeros((rows, 2), np.float32))
        global_step = psync.get_or_create_global_step()
    sgd = psync.optimizers.SGD(1.0)
    return sums, global_step, psync.SyncReplicasOptimizer(sgd, 2, reduction="sum", **options)


async def test_the_last_of_an_odd_number_of_closures_is_not_left_waiting() -> None:
    async with training(2, 2) as (_, strategy, coordinator):
        sums, global_step, optimizer = declared(strategy, 2)

        async def step() -> psync.PushResult:
            gradient = -np.ones_like(await sums.read())
            return await optimizer.apply_gradients([(gradient, sums)], global_step)

        values = [coordinator.schedule(step) for _ in range(101)]
        await coordinator.join()
        results = await coordinator.fetch(values)
        assert {result.outcome for result in results} == {Outcome.ACCEPTED}
        counted = Counter((result.count, result.partial) for result in results)
        assert counted == {(2, False): 100, (1, True): 1}
        (last,) = (result for result in results if result.partial)
        assert last.step == await global_step.read() == 51
        assert (await sums.read()).tolist() == [[101, 101]] * 2
        await assert_nothing_is_staged(coordinator)


async def test_nobody_waits_for_a_worker_whose_data_ends_earlier() -> None:
    batches = (2, 5)  # of each worker

    def dataset(context: psync.InputContext) -> list[int]:
        """Each batch is the column that it is to be counted in."""
        worker = context.input_pipeline_id
        return [sum(batches[:worker]) + number for number in range(batches[worker])]

    async with training(2, 2) as (_, strategy, coordinator):
        sums, global_step, optimizer = declared(strategy, sum(batches))

        async def step(data: psync.PerWorkerIterator) -> psync.PushResult:
            gradient = np.zeros_like(await sums.read())
            gradient[next(data)] = -1
            return await optimizer.apply_gradients([(gradient, sums)], global_step)

        data = iter(coordinator.create_per_worker_dataset(dataset))
        values = [
            coordinator.schedule(step, (data,)) for _ in range(500)
        ]  # the first worker takes many
        with pytest.raises(EndOfData):
            await coordinator.join()
        results = await asyncio.gather(*(value.fetch() for value in values), return_exceptions=True)
        counts = Counter(getattr(result, "count", None) for result in results)
        assert counts == {2: 4, 1: 3, None: 493}
        assert await global_step.read() == 5
        assert (await sums.read()).tolist() == [[1, 1]] * sum(batches)


async def test_too_few_living_workers_are_named_and_waited_for_no_longer_than_said() -> None:
    async with training(2, 2, max_restarts=0) as (cluster, strategy, coordinator):
        sums, global_step, optimizer = declared(strategy, 2, min_replicas=2, patience_s=1)

        async def step() -> psync.PushResult:
            gradient = -np.ones_like(await sums.read())
            return await optimizer.apply_gradients([(gradient, sums)], global_step)

        for _ in range(2):
            coordinator.schedule(step)
        await coordinator.join()
        cluster.tasks["worker-1"].kill()
        began = time.monotonic()
        values = [coordinator.schedule(step) for _ in range(4)]
        with pytest.raises(NotEnoughReplicas) as caught:
            await coordinator.join()
        assert 1 < time.monotonic() - began < 20
        text = caught.value.message
        assert "at least 2 living replicas that have data, and for 1 s there were 1 " in text
        assert "missing: /job:worker/task:1" in text
        assert all(value.done() for value in values)
        assert await global_step.read() == 1
        assert (await sums.read()).tolist() == [[2, 2]] * 2


async def test_with_min_replicas_a_step_waits_for_a_worker_that_is_started_again(
    tmp_path: Path,
) -> None:
    async with training(2, 2) as (cluster, strategy, coordinator):
        sums, global_step, optimizer = declared(strategy, 2, min_replicas=2)

        async def step(number: int) -> tuple[int, bool]:
            gradient = -np.ones_like(await sums.read())
            if number == 0 and not list(tmp_path.iterdir()):
                (tmp_path / str(os.getpid())).touch()
                await asyncio.Event().wait()  # until it is killed
            result = await optimizer.apply_gradients([(gradient, sums)], global_step)
            return result.count, result.partial

        values = [coordinator.schedule(step, (number,)) for number in range(4)]
        while (await group_of(coordinator)).get("waiting") != 1 or not list(tmp_path.iterdir()):
            pass
        (victim,) = tmp_path.iterdir()
        (task,) = (task for task in cluster.tasks.values() if task.pid == int(victim.name))
        task.kill()
        await coordinator.join()
        assert await coordinator.fetch(values) == [(2, False)] * 4
        assert await global_step.read() == 2
