"""Opens a checkpoint manager at once, and saves for each line on its stdin.

Argument: the directory of the checkpoints.
"""

import asyncio
import sys

import numpy as np

import psync


async def main() -> None:
    strategy = psync.ParameterServerStrategy()
    async with psync.ClusterCoordinator(strategy):
        with strategy.scope():
            w = psync.Variable(np.full(20_000, 7, np.float32), name="w")
        manager = psync.CheckpointManager(psync.Checkpoint(w=w), sys.argv[1])
        print("opened", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            try:
                print((await manager.save()).name, flush=True)
            except psync.errors.PsyncError as exc:
                print(f"{type(exc).__name__}: {exc.message}", flush=True)


if __name__ == "__main__":
    psync.run(main)
