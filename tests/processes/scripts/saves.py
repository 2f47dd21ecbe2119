"""Trains three epochs of four steps and saves after each; goes on from what it finds.

Argument: the directory of the checkpoints.
"""

import sys

import numpy as np

import psync


async def main():
    strategy = psync.ParameterServerStrategy(
        psync.TFConfigClusterResolver(), psync.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        w = psync.Variable(np.zeros(4, np.float32), name="w")
    sgd = psync.optimizers.SGD(1.0)
    progress = psync.SavedState(epoch=0)
    checkpoint = psync.Checkpoint(w=w, sgd=sgd, progress=progress)
    manager = psync.CheckpointManager(checkpoint, sys.argv[1])
    async with psync.ClusterCoordinator(strategy) as coordinator:

        async def step():
            await sgd.apply_gradients([(-np.ones(4, np.float32), w)])

        found = await manager.restore_or_initialize()
        print(f"began at epoch {progress.epoch} from {found and found.name}")
        while progress.epoch < 3:
            for _ in range(4):
                coordinator.schedule(step)
            await coordinator.join()
            progress.epoch += 1
            await manager.save()
        print(f"ended with {(await w.read()).tolist()}, step {await sgd.iterations.read()}")


if __name__ == "__main__":
    psync.run(main)
