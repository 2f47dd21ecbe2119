"""Trains until a task was lost and is there again, or for ever: losses.py MODE DIRECTORY.

MODE: "checkpoint", "backup", or "nothing": what a lost ps comes back from. Only the first life of
a chief waits for a loss.
"""

import asyncio
import os
import sys

import numpy as np

import psync

MODE, DIRECTORY = sys.argv[1:]


def is_over(kinds):
    """Whether these events, the newest first, tell of a task that was lost and came back."""
    if os.environ["PSYNC_RESTART_COUNT"] != "0":
        return True
    return "reachable" in kinds or ("lost" in kinds and "joined" in kinds[: kinds.index("lost")])


async def main():
    strategy = psync.ParameterServerStrategy(
        psync.TFConfigClusterResolver(), psync.FixedShardsPartitioner(2),
        ps_recovery="backup" if MODE == "backup" else "checkpoint",
    )  # fmt: skip
    with strategy.scope():
        w = psync.Variable(np.zeros(100, np.float32), name="w")
    sgd = psync.optimizers.SGD(1.0)
    manager = psync.CheckpointManager(psync.Checkpoint(w=w, sgd=sgd), DIRECTORY)

    async def step():
        await asyncio.sleep(0.01)
        await sgd.apply_gradients([(np.ones(100, np.float32), w)])

    async def train():
        for _ in range(20):
            coordinator.schedule(step)
        await coordinator.join()

    async with psync.ClusterCoordinator(strategy) as coordinator:
        if MODE == "checkpoint":
            await manager.restore_or_initialize()
        await train()
        if MODE == "checkpoint":
            await manager.save()
        await coordinator.backed_up()
        print("training", flush=True)
        try:
            while not is_over([each.kind for each in (await coordinator.status()).events]):
                await train()
            await train()
        except psync.ParameterServerLost as error:
            print(error.message)


if __name__ == "__main__":
    psync.run(main)
