"""A program in a package; it cannot run as a file: python -m packaged.train."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

import psync

from .batches import gradient


@dataclass
class Done:
    """A class of ``__main__``, which travels from worker to chief."""

    by: int


async def main() -> None:
    strategy = psync.ParameterServerStrategy()
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(3, np.float32), name="w")

        async def step() -> Done:
            await w.assign_add(gradient())
            return Done(psync.get_worker_index())

        done = [coordinator.schedule(step) for _ in range(10)]
        await coordinator.join()
        assert all(type(each) is Done for each in await coordinator.fetch(done))
        print((await w.read()).tolist(), *sys.argv[1:])


if __name__ == "__main__":
    psync.run(main)
