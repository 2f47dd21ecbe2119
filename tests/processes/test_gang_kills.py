"""A gang on real processes: what the others and the program are told when one is killed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

import psync
from psync import VariableAggregation
from psync.errors import WorkerLost
from real_training import ONE_LOOP, training

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]


async def appeared(path: Path, variable: psync.Variable) -> str:
    while not path.exists() or not path.read_text():
        await variable.read()  # time for everybody
    return path.read_text()


@pytest.mark.promise("gangs.all-or-none")
@pytest.mark.parametrize("max_restarts", [0, 10])
async def test_a_worker_killed_in_a_collective_is_named_and_training_goes_on(
    max_restarts: int, tmp_path: Path
) -> None:
    async with training(2, 3, max_restarts=max_restarts) as (cluster, strategy, coordinator):
        with strategy.scope():
            w = psync.Variable(np.zeros(6, np.float32), name="w")
            told = psync.Variable(0.0, name="told", aggregation=VariableAggregation.SUM)
        sgd = psync.optimizers.SGD(1.0)

        async def fn() -> None:
            context = psync.get_replica_context()
            index = context.replica_id_in_sync_group
            await sgd.apply_gradients([(np.full(6, -1, np.float32), w)])
            (tmp_path / f"pid {index}").write_text(str(os.getpid()))
            if index == 1:
                await asyncio.Event().wait()
            try:
                await context.all_reduce("sum", np.ones(100_000))
            except WorkerLost as exc:
                (tmp_path / f"told {index}").write_text(exc.message)
                raise

        gang = asyncio.create_task(strategy.run(fn))
        pids = [int(await appeared(tmp_path / f"pid {index}", w)) for index in range(3)]
        assert pids == [cluster.tasks[f"worker-{index}"].pid for index in range(3)]
        cluster.tasks["worker-1"].kill()
        with pytest.raises(WorkerLost, match="/job:worker/task:1 was lost") as caught:
            await gang
        assert caught.value.task == "/job:worker/task:1"
        text = "/job:worker/task:1 was lost with replica 1, which all wait for"
        for index in (0, 2):
            path = tmp_path / f"told {index}"
            assert not path.exists() or path.read_text() == text
        assert (await w.read()).tolist() == [3] * 6  # what was pushed before stays

        async def step() -> int:
            await sgd.apply_gradients([(np.full(6, -1, np.float32), w)])
            return os.getpid()

        values = [coordinator.schedule(step) for _ in range(20)]
        await coordinator.join()
        assert pids[1] not in await coordinator.fetch(values)
        assert (await w.read()).tolist() == [23] * 6
        if max_restarts:  # all three are there again, one of them in a new life
            async with asyncio.timeout(30):
                while len(coordinator.statistics()["closures"].workers) < 3:
                    await coordinator.ps_statistics()

        async def again() -> tuple[int, int]:
            await told.assign_add(1.0)
            total = await psync.get_replica_context().all_reduce("sum", 1)
            return os.getpid(), total

        found, counts = await strategy.run(again)
        count = 3 if max_restarts else 2
        assert list(counts) == [count] * count
        assert len(set(found)) == count
        assert {pids[0], pids[2]} <= set(found)
        assert pids[1] not in set(found)
        assert await told.read() == count


async def test_a_gang_whose_ps_is_killed_ends_with_that_error(tmp_path: Path) -> None:
    async with training(1, 2, ps_timeout=1.0) as (cluster, strategy, coordinator):
        with strategy.scope():
            v = psync.Variable(0.0, name="v")

        async def fn() -> None:
            index = psync.get_replica_context().replica_id_in_sync_group
            await v.read()
            (tmp_path / f"pid {index}").write_text(str(os.getpid()))
            if index:
                await asyncio.Event().wait()
            await psync.get_replica_context().all_reduce("sum", 1)

        gang = asyncio.create_task(strategy.run(fn))
        for index in range(2):
            await appeared(tmp_path / f"pid {index}", v)
        cluster.tasks["ps-0"].kill()
        with pytest.raises(psync.ParameterServerLost):
            await gang
        with pytest.raises(psync.ParameterServerLost):
            await coordinator.join()
