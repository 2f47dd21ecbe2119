"""Trains on ps and worker tasks that run already: connect_later.py CLUSTER [JOB].

The cluster as JSON; this process is the first task of JOB, or none of the cluster.
"""

import asyncio
import json
import sys

import numpy as np

import psync


async def main() -> None:
    cluster, *job = sys.argv[1:]
    resolver = psync.SimpleClusterResolver(
        psync.ClusterSpec(json.loads(cluster)),
        task_type=job[0] if job else None,
        task_id=0 if job else None,
    )
    strategy = psync.ParameterServerStrategy(resolver, psync.FixedShardsPartitioner(2))
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            v = psync.Variable(np.zeros((4, 2), np.float32), name="v")

        async def step() -> int | None:
            await v.assign_add(np.ones((4, 2), np.float32))
            return psync.get_worker_index()

        workers = [coordinator.schedule(step) for _ in range(20)]
        await coordinator.join()
        print((await v.read()).tolist(), len(await coordinator.fetch(workers)))
        print(*v.device)


asyncio.run(main())
