"""A program without async; with an argument it waits for a step that never ends."""

import sys

import numpy as np

import psync
from psync import blocking


def main() -> None:
    with blocking.LocalCluster(1, 1) as cluster:
        train(cluster.resolver)


def train(resolver: psync.ClusterResolver | None = None) -> None:
    strategy = psync.ParameterServerStrategy(resolver or psync.TFConfigClusterResolver())
    with blocking.ClusterCoordinator(strategy) as coordinator, strategy.scope():
        w = psync.Variable(np.zeros(2, np.float32), name="w")
        go_on = psync.Variable(np.zeros((), np.int64), name="go_on")

        def step(amount: float) -> float:
            psync.wait(w.assign_add(np.full(2, amount, np.float32)))
            return amount

        async def forever() -> None:
            while not await go_on.read():
                pass

        amounts = [coordinator.schedule(step, (float(i),)) for i in range(4)]
        coordinator.join()
        print("fetched", coordinator.fetch(amounts), "w", psync.wait(w.read()).tolist(), flush=True)
        if sys.argv[1:]:
            coordinator.schedule(forever)
            try:
                print("joining", flush=True)
                coordinator.join()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                raise


if __name__ == "__main__":
    if "run" in sys.argv[1:]:
        blocking.run(train)
    else:
        main()
