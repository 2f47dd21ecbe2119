"""A program whose steps hang, each in a way of its own: stuck.py KIND."""

import asyncio
import ctypes
import sys

import numpy as np

import psync


async def main() -> None:
    kind = sys.argv[1]
    strategy = psync.ParameterServerStrategy(psync.TFConfigClusterResolver())
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            v = psync.Variable(np.zeros(4, np.float32), name="v")
            global_step = psync.get_or_create_global_step()
        optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(0.1), 2)

        async def waits_for_ever() -> None:
            asyncio.get_running_loop().call_soon(print, "stuck")  # when it waits
            await asyncio.Event().wait()

        async def computes_on_the_loop() -> None:
            print("stuck", flush=True)
            number = 0
            while True:
                number += 1

        async def never_returns_from_c() -> None:
            mutex = ctypes.create_string_buffer(64)
            lock = ctypes.PyDLL(None).pthread_mutex_lock  # does not give the interpreter free
            lock(mutex)
            print("stuck", flush=True)
            lock(mutex)

        async def waits_for_a_token() -> None:
            await psync.pull(v)
            await optimizer.apply_gradients([(np.ones(4, np.float32), v)], global_step)

        async def counted() -> int:
            ps_0, *_ = await coordinator.ps_statistics()
            return sum(group["counted"] for group in ps_0["sync"].values())

        coordinator.schedule(locals()[kind])
        if kind == "waits_for_a_token":
            coordinator.schedule(computes_on_the_loop)
            while not await counted():
                continue
            print("stuck", flush=True)
        await coordinator.join()


if __name__ == "__main__":
    psync.run(main)
