"""Trains until stdin has a line; says when it has begun."""

import asyncio
import sys

import numpy as np

import psync


async def main() -> None:
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(1000, np.float32), name="w")
        sgd = psync.optimizers.SGD(0.05)

        async def train_step() -> None:
            value = await psync.pull(w)
            await asyncio.sleep(0.005)
            await sgd.apply_gradients([(value, w)])

        ending = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await coordinator.schedule(train_step)
        print("ready", flush=True)
        while not ending.done():
            for _ in range(20):
                coordinator.schedule(train_step)
            await coordinator.join()


psync.run(main)
