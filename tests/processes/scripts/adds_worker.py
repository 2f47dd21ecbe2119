"""A chief that adds a worker: adds_worker.py ADDRESS INDEX. Trains on it alone."""

import asyncio
import os
import sys

import psync


async def main() -> None:
    address, index = sys.argv[1:]
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            counter = psync.Variable(0)
        first = coordinator.schedule(os.getpid)
        print("added", await coordinator.add_worker(address, index=int(index)))

        async def step() -> int:
            await counter.assign_add(1)
            await asyncio.sleep(0.02)
            return os.getpid()

        pids = {await first}
        count = 0
        while len(pids) < 2:
            values = [coordinator.schedule(step) for _ in range(10)]
            await coordinator.join()
            pids |= set(await coordinator.fetch(values))
            count += len(values)
        await coordinator.remove_worker("/job:worker/task:0")
        values = [coordinator.schedule(step) for _ in range(10)]
        await coordinator.join()
        assert set(await coordinator.fetch(values)) == pids - {await first}
        assert await counter.read() == count + 10
        print("trained")


psync.run(main)
