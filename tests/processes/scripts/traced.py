"""Trains until stdin has a line; the clocks of its workers are far from those of others."""

import asyncio
import dataclasses
import sys
import time
from typing import Any

import numpy as np

import psync
from psync.launch import tasks

make_task = tasks.make_task


def with_another_clock(platform: Any, job: str, index: int, *args: Any, **options: Any) -> Any:
    ahead = 1000.0 * (index + 1)
    platform = dataclasses.replace(platform, now=lambda: time.monotonic() + ahead)
    return make_task(platform, job, index, *args, **options)


tasks.make_task = with_another_clock


async def main() -> None:
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(1000, np.float32), name="w")
        sgd = psync.optimizers.SGD(0.05)

        def train_step() -> None:
            value = psync.wait(psync.pull(w))
            psync.wait(sgd.apply_gradients([(value, w)]))

        ending = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await coordinator.schedule(train_step)
        print("ready", flush=True)
        while not ending.done():
            for _ in range(20):
                coordinator.schedule(train_step)
            await coordinator.join()


psync.run(main)
