"""A ps process with a backup in another one is killed: nothing is lost, and training goes on."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import psync
from psync import FailoverEvent
from real_training import training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

KILLS = 4


@pytest.mark.promise("answers.after-failover")
@pytest.mark.smoke
async def test_kills_lose_no_update_and_double_none() -> None:
    async def add(counter: Any) -> None:
        await counter.assign_add(np.ones(2, np.int64))

    async with training(2, 2, max_restarts=100, ps_recovery="backup") as (
        cluster,
        strategy,
        coordinator,
    ):
        with strategy.scope():
            counter = psync.Variable(np.zeros(2, np.int64), name="counter")
        scheduled = 0
        for number in range(KILLS):
            await coordinator.backed_up()
            for _ in range(200):
                coordinator.schedule(add, args=(counter,))
            scheduled += 200
            while (await counter.read()).max() < scheduled - 190:  # it is in the middle of them
                continue
            os.kill(cluster.tasks[f"ps-{number % 2}"].pid, signal.SIGKILL)
            await coordinator.join()
            assert (await counter.read()).tolist() == [scheduled] * 2
        events = coordinator.events()
        for _ in range(KILLS):
            event = await anext(events)
            assert isinstance(event, FailoverEvent)
            assert event.seconds < 5
