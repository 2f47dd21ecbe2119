"""A step writes to what it has pulled, past numpy, as torch.from_numpy(pulled) does."""

import ctypes

import numpy as np

import psync

NBYTES = 4 << 20


async def main():
    strategy = psync.ParameterServerStrategy()
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            w = psync.Variable(np.zeros(NBYTES // 4, np.float32), name="w")

        def step(copy):
            pulled = psync.wait(psync.pull(w, copy=copy))
            ctypes.memset(pulled.__array_interface__["data"][0], 0, NBYTES)
            return "written"

        print(await coordinator.schedule(step, args=(True,)))
        coordinator.schedule(step, args=(False,))
        try:
            await coordinator.join()
        except psync.ClosureError as error:
            print(error)


if __name__ == "__main__":
    psync.run(main)
