"""A program of which every task prints: talk.py [quiet] [much] [log].

"quiet": the chief does not; "log": steps log and print nothing on stderr.
"""

import logging
import sys

import numpy as np

import psync

LINES = 2000 if "much" in sys.argv else 1


async def main() -> None:
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            v = psync.Variable(np.zeros(4, np.float32), name="v")

        prints = "log" not in sys.argv

        async def step(number: int) -> None:
            for _ in range(LINES):
                print(f"step {number} {'x' * 200}")
            if prints:
                print(f"error {number}", file=sys.stderr)
            logging.getLogger("psync").warning("log %d", number)
            await v.assign_add(np.ones(4, np.float32))

        for number in range(20):
            coordinator.schedule(step, args=(number,))
        await coordinator.join()
        assert (await v.read())[0] == 20
        if "quiet" not in sys.argv:
            print("the chief has ended")


if __name__ == "__main__":
    psync.run(main)
