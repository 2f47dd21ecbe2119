"""A chief that adds 1 to a variable and attaches: `SIZE early|late|grouped live|die`."""

import asyncio
import os
import signal
import sys

import numpy as np

import psync


async def main() -> None:
    size, when, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())

    def declare() -> psync.Variable:
        with strategy.scope():
            return psync.Variable(np.zeros(size, np.float32), name="v")

    variable = declare() if when == "early" else None
    async with psync.ClusterCoordinator(strategy, attach=True):
        if variable is None:
            variable = declare()
        if when == "grouped":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(variable.assign_add(np.ones(size, np.float32)))
        else:
            await variable.assign_add(np.ones(size, np.float32))
        if end == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        print((await variable.read()).tolist())


psync.run(main)
