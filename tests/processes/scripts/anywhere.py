"""One script for every launcher: counts, with workers and ps tasks that come and go.

anywhere.py DIRECTORY: in rounds, with a checkpoint in DIRECTORY after each one, until there is a
file DIRECTORY/enough; says where it is, and what was counted in the end. Started again, it goes on
from the newest checkpoint.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

import psync

A_ROUND = 20


async def main():
    directory = Path(sys.argv[1])
    strategy = psync.ParameterServerStrategy(ps_recovery="backup")
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            one, other = psync.Variable(0.0), psync.Variable(np.zeros(3, np.float32))
        sgd = psync.optimizers.SGD(1.0)
        manager = psync.CheckpointManager(psync.Checkpoint(one=one, other=other), directory)
        await manager.restore_or_initialize()
        counted = int(await one.read())
        print("began at", counted, flush=True)

        async def step():
            await asyncio.sleep(0.02)
            await sgd.apply_gradients([(-1.0, one), (np.full(3, -1, np.float32), other)])

        while not (directory / "enough").exists():
            for _ in range(A_ROUND):
                coordinator.schedule(step)
            await coordinator.join()
            await manager.save()
            counted += A_ROUND
            print("counted", counted, flush=True)
        values = [value.tolist() for value in await psync.pull((one, other))]
        print("total", values == [counted, [counted] * 3], *values, flush=True)


if __name__ == "__main__":
    psync.run(main)
