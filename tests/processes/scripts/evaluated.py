"""Trains and saves a checkpoint for each line on its stdin; its evaluator prints what it finds.

Argument: the directory of the checkpoints.
"""

import asyncio
import os
import sys

import numpy as np

import psync

DIRECTORY = sys.argv[1]


def declared():
    strategy = psync.ParameterServerStrategy(
        psync.TFConfigClusterResolver(), psync.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        model = {"w": psync.Variable(np.zeros(4, np.float32), name="w")}
    optimizer = psync.optimizers.SGD(1.0, momentum=0.5)
    return strategy, model, optimizer, psync.Checkpoint(model=model, optimizer=optimizer)


async def stdin():
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def main():
    lines = await stdin()
    strategy, model, optimizer, checkpoint = declared()
    manager = psync.CheckpointManager(checkpoint, DIRECTORY, max_to_keep=1)
    async with psync.ClusterCoordinator(strategy) as coordinator:

        async def step():
            await optimizer.apply_gradients([(-np.ones(4, np.float32), model["w"])])

        while await lines.readline():
            for _ in range(5):
                coordinator.schedule(step)
            await coordinator.join()
            path = await manager.save()
            print(f"saved {path.name} {(await psync.pull(model))['w'].sum():g}")


def total(values):
    return {"sum": values["model"]["w"].sum(), "step": values["optimizer"]["step"]}


async def evaluate():
    checkpoint = declared()[-1]
    evaluator = psync.SidecarEvaluator(checkpoint, total, DIRECTORY, poll_interval=0.05)
    print(f"evaluator {os.getpid()}")
    try:
        async for result in evaluator:
            step = int(result.logs["step"])
            print(f"found {result.path.name} {result.logs['sum']:g} at step {step}")
    finally:
        print("evaluator ends")


if __name__ == "__main__":
    psync.run(main, evaluator=evaluate)
