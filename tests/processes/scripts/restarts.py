"""Counts to 60, saves after every ten, goes on from the newest checkpoint: restarts.py DIRECTORY.

In its first life it waits at 25, until it is killed, the count has changed, or DIRECTORY has a file
"go on".
"""

import asyncio
import os
import sys
from pathlib import Path

import psync

DIRECTORY = Path(sys.argv[1])
FIRST_LIFE = os.environ.get("PSYNC_RESTART_COUNT") == "0"


async def main():
    strategy = psync.ParameterServerStrategy(
        psync.TFConfigClusterResolver(), psync.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        count = psync.Variable(0, name="count")
        w = psync.Variable([0.0, 0.0, 0.0], name="w")
    optimizer = psync.optimizers.SGD(1.0, momentum=0.5)
    checkpoint = psync.Checkpoint(count=count, w=w, optimizer=optimizer)
    manager = psync.CheckpointManager(checkpoint, DIRECTORY / "checkpoints")
    waits, workers = FIRST_LIFE, set()

    async def step():
        await optimizer.apply_gradients([([-1.0, 0.0, 1.0], w)])
        await count.assign_add(1)
        return os.getpid()

    async with psync.ClusterCoordinator(strategy) as coordinator:
        newest = await manager.restore_or_initialize()
        print("begins at", int(await count.read()), newest and newest.name, flush=True)
        while (done := int(await count.read())) < 60:
            if done == 25 and waits:
                waits = False
                print("waits", flush=True)
                while not (DIRECTORY / "go on").exists() and await count.read() == 25:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                continue
            values = [coordinator.schedule(step) for _ in range(5)]
            await coordinator.join()
            workers |= set(await coordinator.fetch(values))
            if (done + 5) % 10 == 0:
                await manager.save()
        steps = int(await optimizer.iterations.read())
        print("ends at", done, steps, (await w.read()).tolist(), flush=True)
        print("workers", *sorted(workers))


if __name__ == "__main__":
    psync.run(main)
