"""A chief whose workers change: for each line of stdin, ``N``, it waits until N take part.

Then it says which they are. At the end, a second program is made of the workers that there are.
With the argument "early", it waits for a line before its coordinator is started.
"""

import asyncio
import json
import os
import sys

import psync


async def index() -> int:
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


async def main() -> None:
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    if "early" in sys.argv:
        print("strategy", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    async with psync.ClusterCoordinator(strategy):
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            there = []
            while len(there) != int(line):
                there = strategy.experimental_local_results(await strategy.run(index))
            print("workers", *there, flush=True)
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    async with psync.ClusterCoordinator(strategy):
        there = strategy.experimental_local_results(await strategy.run(index))
        print("at last", *there, flush=True)


psync.run(main)
