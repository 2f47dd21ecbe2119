"""The measurements of ``scaling.py``: one cluster of one size, in a process of its own.

A point is a function ``(size, quick)`` that returns, for each of its figures, one number: µs or
bytes for one of what is counted. Each warms up first, and each checks its variables or results
afterwards. "CPU" is ``time.process_time`` of this process, of which others on the machine
take nothing away; the rest is what a clock shows.

Where hundreds of workers live in one process, Python's garbage collector walks through what all
of them hold. So these points measure twice: as it is, and with the collector switched off.
"""

import asyncio
import contextlib
import gc
import json
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
from throughput import check

import psync
from psync.bench.peers import cpu_seconds_below
from psync.net.connection import Connection

PAGE = os.sysconf("SC_PAGE_SIZE")
KIB, MIB = 1 << 10, 1 << 20
SMALL = 16  # elements of a small variable
WITH, WITHOUT = "as it is", "without the collector"


@contextlib.asynccontextmanager
async def training(num_ps, num_workers, partitioner=None, *, processes=True):
    """A cluster with a coordinator to which all workers belong."""
    async with psync.LocalCluster(num_ps, num_workers, processes=processes) as cluster:
        strategy = psync.ParameterServerStrategy(cluster.resolver, partitioner)
        async with psync.ClusterCoordinator(strategy) as coordinator:
            async with asyncio.timeout(120):
                await all_attached(coordinator, num_workers)
            yield cluster, strategy, coordinator


async def all_attached(coordinator, num_workers):
    """Wait until all workers are ready for closures."""
    while True:
        workers = (await coordinator.status()).workers
        if [worker.state for worker in workers] == ["idle"] * num_workers:
            return
        await asyncio.sleep(0.05)


async def nothing():
    """Be an empty closure."""
    return 1


async def closures(coordinator, count):
    """Return µs for each of so many empty closures: on the clock, and of this process's CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    values = [coordinator.schedule(nothing) for _ in range(count)]
    await coordinator.join()
    total = sum(await coordinator.fetch(values))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    check(total == count, f"{count} closures returned {total}")
    return seconds / count * 1e6, cpu / count * 1e6


class Steps:
    """Variables, and workers that pull all of them and push to all, step after step.

    Args:
        coordinator: Of the cluster.
        strategy: Its own.
        shapes: Of the variables, float32.
    """

    def __init__(self, coordinator, strategy, shapes):
        self._coordinator = coordinator
        self._optimizer = psync.optimizers.SGD(1.0)
        self._pushes = 0
        with strategy.scope():
            self.variables = [
                psync.Variable(zeros, shape=shape, dtype=np.float32, name=f"v{number}")
                for number, shape in enumerate(shapes)
            ]

    async def run(self, workers, steps):
        """Take so many steps on each worker; return the µs of one, as the workers see them.

        Returns:
            µs on the clock for a step of one worker, from the first start to the last end; µs of
            this process's CPU for one step of one worker; µs of a worker process's CPU.
        """
        variables, optimizer = self.variables, self._optimizer

        async def work():
            gradients = [np.ones(variable.shape, np.float32) for variable in variables]
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                await psync.pull(variables)
                await optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return began, time.perf_counter(), time.process_time() - cpu

        cpu = time.process_time()
        scheduled = [self._coordinator.schedule(work) for _ in range(workers)]
        await self._coordinator.join()
        starts, ends, own = zip(*await self._coordinator.fetch(scheduled), strict=True)
        cpu = time.process_time() - cpu
        self._pushes += workers * steps
        seconds = max(ends) - min(starts)
        return seconds / steps * 1e6, cpu / (workers * steps) * 1e6, own[0] / steps * 1e6

    async def check(self):
        """Compare some variables with what the pushes must have made of them."""
        expected = -float(self._pushes)  # whole numbers: exact in float32
        for variable in {self.variables[0], self.variables[-1]}:
            value = await variable.read()
            check((value == expected).all(), f"{variable.name}: expected {expected} everywhere")


def zeros(shape, offset):
    """Initialise a shard."""
    return np.zeros(shape, np.float32)


async def processes(size, quick):
    """Worker processes, 2 ps; what all workers together do in a time is divided by it."""
    async with training(2, size) as (_, strategy, coordinator):
        steps = Steps(coordinator, strategy, [(SMALL,)] * 2)
        await closures(coordinator, 200 * size)
        clock, cpu = await closures(coordinator, 5_000 if quick else 20_000)
        count = max(20, (500 if quick else 2_000) // size)
        await steps.run(size, 20)
        step, _, _ = await steps.run(size, count)
        await steps.check()
    return {"closure": clock, "closure, CPU of the chief": cpu, "step": step / size}


async def here(size, quick):
    """All workers in one process, 2 ps."""
    count = 10_000 if quick else 20_000
    async with training(2, size, processes=False) as (_, strategy, coordinator):
        figures = {}

        async def note(what):
            runs = [(await closures(coordinator, count))[1] for _ in range(3)]
            figures[f"closure, {what}"] = sum(runs) / 3  # a collection hits one of several

        await closures(coordinator, max(count, 10 * size))
        await note(WITH)
        with uncollected():
            await note(WITHOUT)
        steps = Steps(coordinator, strategy, [(SMALL,)] * 2)
        await steps.variables[0].read()
        figures["first step"] = (await steps.run(size, 1))[1]
        many = max(4, (2_000 if quick else 4_000) // size)
        await steps.run(size, 2)
        figures[f"step, {WITH}"] = (await steps.run(size, many))[1]
        with uncollected():
            figures[f"step, {WITHOUT}"] = (await steps.run(size, many))[1]
        await steps.check()
    return figures


@contextlib.contextmanager
def uncollected():
    """Do without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def synchronous(coordinator, strategy, num_ps, num_workers, steps, cpu):
    """Take synchronous steps, with 64 KiB on each ps; return what ``cpu`` says, for each step."""
    with strategy.scope():
        model = [
            psync.Variable(zeros, shape=(16 * KIB,), dtype=np.float32, name=f"v{number}")
            for number in range(num_ps)
        ]
        counter = psync.get_or_create_global_step()
    optimizer = psync.SyncReplicasOptimizer(psync.optimizers.SGD(1.0), num_workers)

    async def work(count):
        pairs = [(np.ones(variable.shape, np.float32), variable) for variable in model]
        for _ in range(count):
            await psync.pull(model)
            await optimizer.apply_gradients(pairs, counter)

    async def run(count):
        for _ in range(num_workers):
            coordinator.schedule(work, args=(count,))
        await coordinator.join()

    await run(3)
    before = cpu()
    await run(steps)
    after = cpu()
    for variable in model:
        value = await variable.read()
        check((value == -3.0 - steps).all(), f"{variable.name}: expected {-3 - steps} everywhere")
    return {task: (after[task] - before[task]) / steps * 1e6 for task in before}


def cpu_of_tasks():
    """Return the seconds of CPU of each task below this process, by job and index."""
    spent = {}
    for pid, seconds in cpu_seconds_below(os.getpid()).items():
        environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
        for line in environ:
            if line.startswith("TF_CONFIG="):
                task = json.loads(line.removeprefix("TF_CONFIG="))["task"]
                spent[task["type"], task["index"]] = seconds
    return spent


async def wide(size, quick):
    """Synchronous steps of ``size`` ps tasks and twice as many workers, each a process."""
    async with training(size, 2 * size) as (_, strategy, coordinator):
        spent = await synchronous(
            coordinator, strategy, size, 2 * size, 100 if quick else 300, cpu_of_tasks
        )
    others = [cost for (job, index), cost in spent.items() if job == "ps" and index]
    return {
        "all tasks": sum(spent.values()), "ps 0": spent["ps", 0],
        "another ps": sum(others) / len(others),
    }  # fmt: skip


async def wide_here(size, quick):
    """Synchronous steps of ``size`` workers and 16 ps tasks in one process."""
    async with training(16, size, processes=False) as (_, strategy, coordinator):
        steps = max(3, (600 if quick else 2_000) // size)
        cpu = await synchronous(
            coordinator, strategy, 16, size, steps, lambda: {"": time.process_time()}
        )
    return {"a worker's share": cpu[""] / size}


async def variables(size, quick):
    """So many small variables, 2 ps, 1 worker."""
    async with training(2, 1) as (_, strategy, coordinator):
        began = time.perf_counter()
        steps = Steps(coordinator, strategy, [(SMALL,)] * size)
        await steps.variables[0].read()
        created = time.perf_counter() - began
        count = max(5, (2_000 if quick else 10_000) // size)
        await steps.run(1, 5)
        step, _, cpu = await steps.run(1, count)
        await steps.check()
    return {
        "creation": created / size * 1e6,
        "step": step / size,
        "step, CPU of the worker": cpu / size,
    }


async def shards(size, quick):
    """One variable of 4 MiB in so many shards, 2 ps, 1 worker."""
    async with training(2, 1, psync.FixedShardsPartitioner(size)) as (_, strategy, coordinator):
        steps = Steps(coordinator, strategy, [(MIB,)])
        await steps.run(1, 10)
        step, _, cpu = await steps.run(1, 50 if quick else 200)
        await steps.check()
    return {"step": step, "step, CPU of the worker": cpu}


async def ps(size, quick):
    """So many ps tasks with 1 KiB on each, 1 worker."""
    async with training(size, 1, psync.FixedShardsPartitioner(size)) as (_, strategy, coordinator):
        steps = Steps(coordinator, strategy, [(256 * size,)])
        await steps.run(1, 20)
        step, _, cpu = await steps.run(1, max(50, (500 if quick else 2_000) // size))
        await steps.check()
    return {"step": step / size, "step, CPU of the worker": cpu / size}


async def nbytes(size, quick):
    """One variable of so many bytes, in two shards on 2 ps from 1 MiB on, 1 worker."""
    partitioner = psync.MinSizePartitioner(min_shard_bytes=512 * KIB, max_shards=2)
    async with training(2, 1, partitioner) as (_, strategy, coordinator):
        steps = Steps(coordinator, strategy, [(max(1, size // 4),)])
        await steps.run(1, 2)
        count = max(2, min(500, (256 if quick else 1024) * MIB // size))
        step, _, _ = await steps.run(1, count)
        await steps.check()
    return {"step": step / (size / KIB)}


async def warm_up():
    """Import and make what the first cluster of a process does; nothing else stays."""
    async with training(2, 2, processes=False) as (_, strategy, coordinator):
        await Steps(coordinator, strategy, [(SMALL,)]).run(2, 1)


async def worker_memory(size, quick):
    """So many workers in one process, 2 ps; both ends of each connection are there."""
    await warm_up()
    before, connections = resident(), len(ends_of_connections())
    async with training(2, size, processes=False) as (_, strategy, coordinator):
        steps = Steps(coordinator, strategy, [(SMALL,)])
        await steps.variables[0].read()
        attached, ends = resident(), len(ends_of_connections())
        await steps.run(size, 1)
        trained, more = resident(), len(ends_of_connections())
    return {
        "worker": (trained - before) / size,
        "connection of an attached worker": (attached - before) / ((ends - connections) / 2),
        "connection to a ps": (trained - attached) / ((more - ends) / 2),
    }


async def variable_memory(size, quick):
    """So many variables of 64 bytes; program, ps and worker are in one process."""
    await warm_up()
    async with training(1, 1, processes=False) as (_, strategy, coordinator):
        with traced() as memory:
            steps = Steps(coordinator, strategy, [(SMALL,)] * size)
            await steps.variables[0].read()
            created = memory()
            await steps.run(1, 2)
            return {"created": created / size, "pulled and pushed, too": memory() / size}


async def closure_memory(size, quick):
    """So many closures in the queue, with and without an argument of 8 bytes."""
    figures = {}
    async with training(1, 1, processes=False) as (_, _, coordinator):
        for what, args in (("without arguments", ()), ("with a number", (1.5,))):
            await coordinator.schedule(take, args=args)
            with traced() as memory:
                values = [coordinator.schedule(take, args=args) for _ in range(size)]
                figures[what] = memory() / size
            await coordinator.fetch(values)
            del values
    return figures


async def take(*args):
    """Be an empty closure that is given something."""


async def cores(size, quick):
    """A ps of so many cores: one worker pushes 64 MiB, and waits for the update."""
    figures = {}
    async with training(1, 1) as (cluster, strategy, coordinator):
        for name in ("SGD", "Adam"):
            optimizer = getattr(psync.optimizers, name)(0.5)
            with strategy.scope():
                variable = psync.Variable(zeros, shape=(16 * MIB,), dtype=np.float32, name=name)

            async def pushes(count, variable=variable, optimizer=optimizer):
                gradient = np.ones(variable.shape, np.float32)
                began = time.perf_counter()
                for _ in range(count):
                    await optimizer.apply_gradients([(gradient, variable)])
                return (time.perf_counter() - began) / count * 1e6

            await coordinator.fetch(coordinator.schedule(pushes, args=(3,)))
            bind(cluster.tasks["ps-0"].pid, size)
            count = 10 if quick else 40
            await coordinator.fetch(coordinator.schedule(pushes, args=(3,)))
            figures[f"push, {name}"] = await coordinator.fetch(
                coordinator.schedule(pushes, args=(count,))
            )
            value = await variable.read()
            expected = -0.5 * (count + 6)  # the first steps of Adam are its rate, too
            check(np.allclose(value, expected, rtol=1e-3), f"{name}: expected {expected}")
    return figures


def bind(pid, count):
    """Let all threads of a process run on so many cores only."""
    allowed = sorted(os.sched_getaffinity(0))[:count]
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), allowed)


def resident():
    """Return the bytes of memory that this process has, after what is not needed has gone."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


@contextlib.contextmanager
def traced():
    """Yield what returns the bytes that Python's objects have got since the beginning."""
    gc.collect()
    tracemalloc.start()

    def memory():
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        yield memory
    finally:
        tracemalloc.stop()


def ends_of_connections():
    """Return all ends of connections in this process."""
    return [each for each in gc.get_objects() if type(each) is Connection]
