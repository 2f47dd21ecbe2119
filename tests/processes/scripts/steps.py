"""One main() for each test: `steps.py NAME`."""

import asyncio
import logging
import os
import signal
import sys

import numpy as np

import psync

logger = logging.getLogger("mine")


class Point:
    """Known to workers by name, since they run this script too."""

    def __init__(self, x):
        self.x = x


def coordinator_of(strategy=None):
    return psync.ClusterCoordinator(
        strategy or psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    )


async def prints():
    async def step():
        print("printed in a step")
        print("an error of the step's", file=sys.stderr)
        logger.warning("logged in a step")

    async with coordinator_of() as coordinator:
        await coordinator.schedule(step)
        await coordinator.join()


async def fails():
    async def step():
        return {}["no such key"]

    async with coordinator_of() as coordinator:
        coordinator.schedule(step)
        await coordinator.join()


async def classes():
    async def step(point):
        assert type(point) is Point
        return Point(point.x + 1)

    async with coordinator_of() as coordinator:
        value = coordinator.schedule(step, args=(Point(1),))
        await coordinator.join()
        assert type(await value) is Point
        print((await value).x, isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop))


async def counts():
    """Count with 40 closures; workers may be killed meanwhile."""
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    async with coordinator_of(strategy) as coordinator:
        with strategy.scope():
            one, other = psync.Variable(0.0), psync.Variable(np.zeros(3, np.float32))
        sgd = psync.optimizers.SGD(1.0)

        async def step():
            await sgd.apply_gradients([(-1.0, one), (np.full(3, -1, np.float32), other)])

        for _ in range(40):
            coordinator.schedule(step)
        await coordinator.join()
        print(*[value.tolist() for value in await psync.pull((one, other))])


async def computes():
    """A step that does not leave the loop."""

    async def step():
        print("computing", flush=True)
        while True:
            pass

    async with coordinator_of() as coordinator:
        coordinator.schedule(step)
        await coordinator.join()


async def wrong_option():
    async with coordinator_of():
        psync.InputOptions("fil")


async def nobody_to_add():
    async with coordinator_of() as coordinator:
        await coordinator.add_worker("127.0.0.1:1", timeout=0.2)


async def leaves():
    """Ask one of two workers to leave, and go on with the other."""

    async def step():
        await asyncio.sleep(0.01)
        return os.getpid()

    async with coordinator_of() as coordinator:
        pid = await coordinator.schedule(step)
        os.kill(pid, signal.SIGTERM)
        while len(coordinator.statistics()["closures"].workers) == 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        values = [coordinator.schedule(step) for _ in range(20)]
        await coordinator.join()
        assert pid not in await coordinator.fetch(values)
        await asyncio.sleep(1.5)  # the launcher waits a little before it says a word
        print("left;", len(values), "more ran elsewhere")


if __name__ == "__main__":
    psync.run(globals()[sys.argv[1]])
