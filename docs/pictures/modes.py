"""Draw what four workers do in three modes, one of them slow, from real runs on this machine.

    python docs/pictures/modes.py modes.png

Each mode gets a cluster of its own, 2 ps and 4 worker processes, and trains the same linear model
for the same time. A step's computation is a pause here (30 ms, of worker 3 120 ms), so that the
picture does not depend on how many cores there are; pulls, pushes and waits are real.
"""

import asyncio
import sys
import time

import numpy as np
from matplotlib.figure import Figure

import psync

SECONDS = 4.0
SHOWN = 1.5  # of the timelines
PAUSES = [0.03, 0.03, 0.03, 0.12]  # of each worker's step
COLORS = {"pull": "#7fb3d5", "compute": "#2e6f9e", "push": "#e0a030", "dropped": "#c0392b"}
ROWS = ("worker 3 (slow)", "worker 2", "worker 1", "worker 0")


def optimizer_of(mode):
    rule = psync.optimizers.SGD(0.05)
    if mode == "asynchronous":
        return rule
    needed = 4 if mode == "synchronous" else 3
    return psync.SyncReplicasOptimizer(rule, needed, total_num_replicas=4, strict=True)


async def train(mode):
    """Return a record of each step, and the loss of each second of the run."""
    async with psync.LocalCluster(2, 4) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                w = psync.Variable(np.zeros(100, np.float32), name="w")
                global_step = psync.get_or_create_global_step()
            optimizer = optimizer_of(mode)
            target = np.linspace(-1, 1, 100, dtype=np.float32)

            async def step(number):
                rng = np.random.default_rng(number)
                worker = psync.get_worker_index()
                began = time.time()
                weights = await psync.pull(w)
                pulled = time.time()
                x = rng.normal(size=(16, 100)).astype(np.float32)
                error = x @ (weights - target) + rng.normal(scale=0.1, size=16)
                await asyncio.sleep(PAUSES[worker])  # the computation
                computed = time.time()
                step_of = {} if mode == "asynchronous" else {"global_step": global_step}
                gradient = (x.T @ error / 16).astype(np.float32)
                result = await optimizer.apply_gradients([(gradient, w)], **step_of)
                dropped = result.outcome is not psync.Outcome.ACCEPTED
                return worker, began, pulled, computed, time.time(), dropped

            await coordinator.fetch([coordinator.schedule(step, (n,)) for n in range(8)])  # warm
            begin, losses, values = time.time(), [], []
            while time.time() < begin + SECONDS:
                while len([v for v in values if v.status == psync.RemoteValueStatus.NOT_READY]) < 8:
                    values.append(coordinator.schedule(step, (len(values) + 8,)))
                value = await w.read()
                losses.append((time.time() - begin, float(np.mean((value - target) ** 2))))
                await asyncio.sleep(0.02)
            await coordinator.join()
            records = await coordinator.fetch(values)
    return [(worker, *(t - begin for t in times), late) for worker, *times, late in records], losses


def draw(runs, path):
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    axes = figure.subplot_mosaic(
        [["asynchronous", "loss"], ["synchronous", "loss"], ["with a backup", "loss"]],
        width_ratios=[2, 1],
    )
    for mode, (records, losses) in runs.items():
        axis = axes[mode]
        for worker, began, pulled, computed, ended, late in records:
            row = 3 - worker
            parts = [
                (began, pulled - began),
                (pulled, computed - pulled),
                (computed, ended - computed),
            ]
            push = COLORS["dropped" if late else "push"]
            axis.broken_barh(
                parts, (row - 0.4, 0.8), color=[COLORS["pull"], COLORS["compute"], push]
            )
        counted = sum(not record[-1] for record in records)
        lost = len(records) - counted
        title = f"{mode}: {counted / SECONDS:.0f} gradients a second count"
        axis.set_title(title + (f", {lost / SECONDS:.0f} are dropped" if lost else ""), fontsize=10)
        axis.set(xlim=(0, SHOWN), yticks=range(4), yticklabels=ROWS)
        axes["loss"].semilogy(*zip(*losses, strict=True), label=mode)
    axes["with a backup"].set_xlabel("seconds")
    axes["loss"].set(xlabel="seconds", title="squared error of the weights")
    axes["loss"].legend()
    handles = [axes["asynchronous"].barh(0, 0, color=color) for color in COLORS.values()]
    labels = ["pull", "compute", "push, and wait for the step", "push that came too late"]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


async def main(path):
    runs = {mode: await train(mode) for mode in ("asynchronous", "synchronous", "with a backup")}
    draw(runs, path)
    for mode, (records, losses) in runs.items():
        late = sum(record[-1] for record in records)
        print(f"{mode}: {len(records)} gradients, {late} too late, error {losses[-1][1]:.2g}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "modes.png"))
