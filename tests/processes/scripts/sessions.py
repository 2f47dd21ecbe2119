"""Every task trains by itself: `sessions.py STEPS`, a step in which takes all workers' gradients.

Each push adds 1 to w, and so does their mean: w counts the steps. `sessions.py STEPS HOW`: worker 1
ends after five steps, by an error in a step ("step") or outside of one ("outside"), or by sys.exit
("exit").
"""

import asyncio
import os
import sys

import numpy as np

import psync


async def main():
    last, how = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
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
        if how == "step" and push.step >= 5 and name == "worker-1":
            return typo  # noqa: F821
        return push.step

    async with psync.MonitoredTrainingSession(
        strategy, trains=trains, stop_at_step=last
    ) as session:
        print(f"{name} begins as {os.getpid()}")
        while trains and not session.should_stop():
            made = await session.run(step)
            if how and made is not None and made >= 5 and name == "worker-1":
                if how == "exit":
                    sys.exit("no more")
                raise KeyError("no such thing")
        await session.wait_until_stopped()
        if session.is_chief:
            value, count = await psync.pull((w, global_step))
            print(f"{name}: step {count}, w {value.tolist()}")
    if not session.is_chief:
        await asyncio.sleep(0.3)  # the chief has ended by then
        print(f"{name}: {accepted} accepted")


if __name__ == "__main__":
    psync.run(main, on_workers=True)
