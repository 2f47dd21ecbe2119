"""Begins, and is disturbed: begins.py DIRECTORY. Its workers import until DIRECTORY has "workers".

The chief says "strategy", starts its coordinator, says "started", and waits for "variables".
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import psync

DIRECTORY = Path(sys.argv[1])

while json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker" and not (
    (DIRECTORY / "workers").exists()
):
    time.sleep(0.02)


async def main():
    strategy = psync.ParameterServerStrategy(
        psync.TFConfigClusterResolver(), psync.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        w = psync.Variable(np.arange(4.0), name="w")
    print("strategy", flush=True)
    async with psync.ClusterCoordinator(strategy) as coordinator:
        print("started", flush=True)
        while not (DIRECTORY / "variables").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

        async def step():
            await w.assign_add(np.ones(4))

        for _ in range(10):
            coordinator.schedule(step)
        await coordinator.join()
        print("ends with", (await w.read()).tolist(), flush=True)


if __name__ == "__main__":
    psync.run(main)
