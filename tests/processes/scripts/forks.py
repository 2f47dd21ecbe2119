"""Ends processes that it has forked: in the program, in steps, in a dataset function."""

import asyncio
import multiprocessing
import os
import signal
import time

import psync

fork = multiprocessing.get_context("fork")


def ended():
    """Return how a child ended that was told to as soon as it was there, and what a pool did."""
    child = fork.Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    for _ in range(3):
        with fork.Pool(2) as pool:
            found = pool.map(abs, [-1, 2])
    return child.exitcode, found


def batches(context):
    yield ended()


def waits():
    """Return what psync.wait says in a forked process."""
    receiving, sending = fork.Pipe()

    def wait():
        try:
            psync.wait(asyncio.sleep(0))
        except psync.errors.UsageError as error:
            sending.send(error.message)

    child = fork.Process(target=wait)
    child.start()
    child.join()
    return receiving.recv()


def stray():
    """Leave a child behind that lives on; return its process id."""
    child = fork.Process(target=signal.pause)
    child.start()
    return os.getpid(), child.pid


async def main():
    mine = [await asyncio.to_thread(ended), ended()]
    strategy = psync.ParameterServerStrategy()
    async with psync.ClusterCoordinator(strategy) as coordinator:

        async def on_loop():
            return ended()

        async def of_dataset(data):
            return next(data)

        data = iter(coordinator.create_per_worker_dataset(batches))
        mine += [
            await coordinator.schedule(ended),
            await coordinator.schedule(on_loop),
            await coordinator.schedule(of_dataset, (data,)),
        ]
        print(set(map(str, mine)), flush=True)
        print("wait:", await coordinator.schedule(waits), flush=True)
        if os.environ.get("STRAY"):
            print("stray:", *await coordinator.schedule(stray), flush=True)
            await coordinator.join()
            await asyncio.Event().wait()


if __name__ == "__main__":
    psync.run(main)
