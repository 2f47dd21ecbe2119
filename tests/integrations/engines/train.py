"""A script for psync run, on any engine: it counts to 20."""

import sys

import numpy as np

import psync
from counting import count_of, say, schedule


async def main() -> None:
    counted = []
    for resolver in (None, psync.TFConfigClusterResolver()):
        strategy = psync.ParameterServerStrategy(resolver, psync.FixedShardsPartitioner(2))
        async with psync.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                v = psync.Variable(np.zeros(4), name="v")
            schedule(coordinator, v, 20)
            await coordinator.join()
            counted.append(await count_of(v))
    say(counted=counted, arguments=sys.argv[1:])


if __name__ == "__main__":
    psync.run(main)
