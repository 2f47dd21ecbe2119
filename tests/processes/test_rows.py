"""Rows on real processes: looked up, scattered and pushed by workers, one of which is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import psync
from real_training import ONE_LOOP, training

pytestmark = [pytest.mark.processes, pytest.mark.slow, ONE_LOOP]

ROWS, WIDTH, STEPS = 101, 8, 40


async def test_rows_are_exact_although_a_worker_is_killed() -> None:
    async with training(2, 2, max_restarts=10) as (_, strategy, coordinator):
        with strategy.scope():
            table = psync.Variable(np.zeros((ROWS, WIDTH), np.float32), name="table")
            counts = psync.Variable(np.zeros(ROWS, np.int64), name="counts")
            constant = psync.Variable(
                np.repeat(np.arange(ROWS, dtype=np.float32), WIDTH).reshape(ROWS, WIDTH)
            )
        sgd = psync.optimizers.SGD(1.0)

        async def step(number: int) -> int:
            ids = np.array([[number, 50], [number + 60, number]])  # duplicates, both shards
            rows = await psync.embedding_lookup(constant, ids)
            assert (rows == ids[..., None]).all()
            gradient = psync.IndexedSlices(
                np.full((4, WIDTH), -1, np.float32), ids.reshape(-1), table.shape
            )
            await sgd.apply_gradients([(gradient, table)])
            await counts.scatter_add((ids.reshape(-1), 1))
            return os.getpid()

        values = [coordinator.schedule(step, args=(number,)) for number in range(STEPS // 2)]
        os.kill(await values[3], signal.SIGKILL)
        for number in range(STEPS // 2, STEPS):
            coordinator.schedule(step, args=(number,))
        await coordinator.join()
        expected = np.zeros(ROWS, np.int64)
        for number in range(STEPS):
            np.add.at(expected, [number, 50, number + 60, number], 1)
        assert (await counts.read()).tolist() == expected.tolist()
        np.testing.assert_array_equal(await table[:, 0], expected.astype(np.float32))
        assert (await table[[50, 0, 50], 1]).tolist() == [STEPS, 2, STEPS]

        async def whole(number: int) -> Any:
            await constant.assign(np.full((ROWS, WIDTH), number, np.float32), atomic=True)
            return np.unique(await constant.read(consistent=True)).tolist()

        for value in [coordinator.schedule(whole, args=(number,)) for number in range(10)]:
            assert len(await value) == 1
        await coordinator.join()
