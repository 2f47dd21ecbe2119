"""Every task trains by itself: `sessions.py STEPS`, a step in which takes all workers' gradients.

Each push adds 1 to w, and so does their mean: w counts the steps.
"""

import asyncio
import os
import sys

import numpy as np

import psync


async def main():
    last = int(sys.argv[1])
    resolver = psync.TFConfigClusterResolver()
    workers = resolver.cluster_spec().num_tasks("worker")
    strategy = psync.ParameterServerStrategy(resolver, psync.FixedShardsPartitioner(2))
    with strategy.scope():
        w = psync.Variable(np.zeros(4, np.float32), name="w")
        global_step = psync.get_or_create_global_step()
    optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), workers)
    trains = resolver.task_type == "worker"
    name = f"{resolver.task_type}-{resolver.task_id}"
    accepted = 0

    async def step():
        nonlocal accepted
        await psync.pull(w)
        await asyncio.sleep(0.01)
        push = await optimizer.apply_gradients([(np.full(4, -1, np.float32), w)], global_step)
        accepted += push.outcome is psync.Outcome.ACCEPTED
        if push.step == 5:
            print(f"{name} is at work as {os.getpid()}")

    async with psync.MonitoredTrainingSession(
        strategy, trains=trains, stop_at_step=last
    ) as session:
        print(f"{name} begins as {os.getpid()}")
        while trains and not session.should_stop():
            await session.run(step)
        await session.wait_until_stopped()
        if session.is_chief:
            value, count = await psync.pull((w, global_step))
            print(f"{name}: step {count}, w {value.tolist()}")
    if not session.is_chief:
        await asyncio.sleep(0.3)  # the chief has ended by then
        print(f"{name}: {accepted} accepted")


if __name__ == "__main__":
    psync.run(main, on_workers=True)
