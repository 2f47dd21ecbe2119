"""Synchronous training with two workers, one main() for each test: `sync_steps.py NAME`."""

import asyncio
import contextlib
import sys

import numpy as np

import psync


@contextlib.asynccontextmanager
async def training():
    """A coordinator, and a step of two replicas whose gradients are 1 and, on the other ps, 2."""
    strategy = psync.ParameterServerStrategy(
        psync.TFConfigClusterResolver(), psync.FixedShardsPartitioner(2)
    )
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            values = psync.Variable(np.zeros(2, np.float32))
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), 2)

        async def step(waits=False):
            await values.read()
            if waits:
                await asyncio.Event().wait()
            gradient = np.array([1, 2], np.float32)
            return await optimizer.apply_gradients([(gradient, values)], global_step)

        yield coordinator, step, values, global_step


async def waiting():
    """Say that one replica waits for the other, which does nothing."""
    async with training() as (coordinator, step, _, _):
        coordinator.schedule(step)
        coordinator.schedule(step, (True,))
        while True:
            (ps0, _) = await coordinator.ps_statistics()
            if [group["waiting"] for group in ps0["sync"].values()] == [1]:
                print("waiting", flush=True)
                await coordinator.join()


async def endless():
    """Say that steps run, and go on until killed."""
    async with training() as (coordinator, step, _, global_step):
        while True:
            for _ in range(100):
                coordinator.schedule(step)
            while not await global_step.read():
                pass
            print("endless", flush=True)
            await coordinator.join()


async def counts():
    """Make three steps."""
    async with training() as (coordinator, step, values, global_step):
        results = [coordinator.schedule(step) for _ in range(6)]
        await coordinator.join()
        counted = {result.count for result in await coordinator.fetch(results)}
        now, trained = await psync.pull((global_step, values))
        print("counted", sorted(counted), "step", now, "values", trained.tolist())


if __name__ == "__main__":
    psync.run(globals()[sys.argv[1]])
