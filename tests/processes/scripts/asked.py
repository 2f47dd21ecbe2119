"""A chief that is asked, by lines of stdin:

    who N    wait until N workers take part; say their process ids
    ps       say where the ps tasks listen
    add N    let N closures add 1 to a variable, say "begun", and the sum at the end

It greets with its address. ``--local``: its cluster is a local one. ``--by-name``: at last a step
returns an object of a class of this script.
"""

import asyncio
import os
import sys

import psync


class Answer:
    """Found by its name where a worker runs this script, too."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


async def who() -> int:
    return os.getpid()


async def who_by_name() -> Answer:
    print("asked by name")
    return Answer(os.getpid())


async def follow(resolver: psync.ClusterResolver) -> None:
    strategy = psync.ParameterServerStrategy(resolver)
    async with psync.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            total = psync.Variable(0)

        async def add() -> None:
            await asyncio.sleep(0.02)
            await total.assign_add(1)

        print(resolver.cluster_spec().task_address("chief", 0), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            what, *number = line.split()
            if what == "who":
                there: list[int] = []
                while len(there) != int(number[0]):
                    there = list(strategy.experimental_local_results(await strategy.run(who)))
                print("workers", *there, flush=True)
            elif what == "ps":
                print(*resolver.cluster_spec().as_dict()["ps"], flush=True)
            else:
                values = [coordinator.schedule(add) for _ in range(int(number[0]))]
                await values[0].fetch()
                print("begun", flush=True)
                await coordinator.join()
                print("total", int(await total.read()), flush=True)
        if "--by-name" in sys.argv:
            value = coordinator.schedule(who_by_name)
            await coordinator.join()
            print("by name", (await value.fetch()).pid, flush=True)


async def local() -> None:
    async with psync.LocalCluster(1, 1) as cluster:
        await follow(cluster.resolver)


async def main() -> None:
    await follow(psync.TFConfigClusterResolver())


if __name__ == "__main__":
    if "--local" in sys.argv:
        asyncio.run(local())
    else:
        psync.run(main)
