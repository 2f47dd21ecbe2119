"""Programs of test_dask.py: clients of a Dask cluster of their own. The argument names one."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import cloudpickle
import dask.array
import dask.dataframe
import distributed
import numpy as np
import pandas

import psync
from counting import count_of, counting, places_of, say, schedule
from psync.errors import ConfigurationError, UsageError
from psync.integrations import dask_tasks
from psync.integrations.dask import DaskCluster, dataset

SERIAL = {"threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}


def a_worker_is_killed() -> None:
    """Two ps tasks and two workers on three Dask workers; the one of ps 1 is killed."""
    with distributed.LocalCluster(n_workers=3, **SERIAL) as engine:
        with distributed.Client(engine) as client:
            asyncio.run(_a_worker_is_killed(client))
            say(left=left(client))


async def _a_worker_is_killed(client: distributed.Client) -> None:
    async with DaskCluster(client, 2, 2) as cluster:
        before, pinned = places_of(cluster), tasks_of(client)
        async with counting(ps_recovery="backup") as (coordinator, v):
            schedule(coordinator, v, 100)
            # Work of Dask's own, more than there are threads: nothing of ours is in its way.
            others = client.map(lambda x: x + 1, range(100), pure=False)
            await coordinator.join()
            done = await asyncio.to_thread(client.gather, others)
            say(others=sum(done), stayed=tasks_of(client) == pinned)
            secret = cluster.resolver.platform.secret.value
            say(secret_in=await asyncio.to_thread(where_is, client, secret))
            schedule(coordinator, v, 300)
            [doomed] = [at for at, tasks in pinned.items() if any("ps-1" in t for t in tasks)]
            pids = await asyncio.to_thread(client.run, os.getpid)
            os.kill(pids[doomed], signal.SIGKILL)
            schedule(coordinator, v, 300)
            await coordinator.join()
            counted = await count_of(v)
            while places_of(cluster).get("ps-1") in (None, before["ps-1"]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            schedule(coordinator, v, 100)
            await coordinator.join()
            say(counted=[counted, await count_of(v)], before=before, after=places_of(cluster))
            await cluster.scale(3)
            await cluster.scale(1)
            say(scaled=sorted(places_of(cluster)))


def tasks_of(client: distributed.Client) -> dict[str, list[str]]:
    """Our tasks by Dask worker."""
    tasks = client.processing()
    return {at: sorted(t for t in keys if t.startswith("psync-")) for at, keys in tasks.items()}


def where_is(client: distributed.Client, secret: bytes) -> list[str]:
    """Look for the secret in what scheduler and workers keep of tasks, and in their logs."""

    def look(dask_scheduler: Any) -> bytes:
        tasks = [(t.key, t.run_spec, t.metadata) for t in dask_scheduler.tasks.values()]
        return cloudpickle.dumps((tasks, list(dask_scheduler.get_events().items())))

    seen = {
        "scheduler": client.run_on_scheduler(look),
        "scheduler's log": repr(client.get_scheduler_logs(n=None)).encode(),
        "logs": repr(client.get_worker_logs(n=None)).encode(),
    }
    assert b"psync-ps-0" in seen["scheduler"]
    return [where for where, text in seen.items() if secret in text]


def left(client: distributed.Client) -> list[str]:
    """What is left of us on scheduler and workers, once messages on their way have arrived."""

    def tasks(dask_scheduler: Any) -> list[str]:
        return [key for key in dask_scheduler.tasks if "psync" in str(key)]

    def threads() -> list[str]:
        ours = [t.name for t in threading.enumerate() if t.name.startswith("psync")]
        return ours + list(dask_tasks.here_by_token)

    for _ in range(100):
        found = [*client.run_on_scheduler(tasks), *itertools.chain(*client.run(threads).values())]
        if not found:
            break
        asyncio.run(asyncio.sleep(0.05))
    return found


async def collections() -> None:
    """Arrays and dataframes, partition by partition; the client is asynchronous, on our loop."""
    async with (
        distributed.LocalCluster(n_workers=2, asynchronous=True, **SERIAL) as engine,
        distributed.Client(engine, asynchronous=True) as client,
        DaskCluster(client, 1, 2),
        counting_on_one() as coordinator,
    ):
        x = dask.array.arange(1000, chunks=125).reshape(1000, 1) * np.ones((1, 3))
        y = dask.array.arange(1000, chunks=125)
        frame = dask.dataframe.from_pandas(
            pandas.DataFrame({"a": np.arange(1000), "b": np.ones(1000)}), npartitions=8
        )
        rows = {
            "tuple": dataset((x.rechunk((125, 2)), y), 50, shuffle_seed=1),
            "dict": dataset({"x": x, "y": y}, 50),
            "array": dataset(y, 50),
            "dataframe": dataset(frame, 50),
        }
        for name, one in rows.items():
            say(**{name: await eaten(coordinator, one)})
        for bad in ((x, y.rechunk(100)), 7, {"y": np.ones(3)}):
            try:
                dataset(bad, 50)
            except (ConfigurationError, UsageError) as exc:
                say(**{type(bad).__name__ + "_error": exc.message})


def counting_on_one() -> psync.ClusterCoordinator:
    return psync.ClusterCoordinator(psync.ParameterServerStrategy())


async def eaten(coordinator: psync.ClusterCoordinator, rows: Any) -> list[Any]:
    """Rows and sum that each worker has had, and the shapes of a batch's arrays."""
    strategy = coordinator.strategy
    batches = strategy.experimental_distribute_dataset(rows)
    iterator = iter(coordinator.create_per_worker_dataset(batches))

    def eat(iterator: Any) -> tuple[int, float, Any]:
        seen, total, shapes = 0, 0.0, None
        while True:
            try:
                batch = next(iterator)
            except psync.EndOfData:
                return seen, total, shapes
            parts = batch if isinstance(batch, tuple) else (batch,)
            if isinstance(batch, dict):
                parts = tuple(batch.values())
            shapes = shapes or (type(batch).__name__, [part.shape for part in parts])
            seen, total = seen + len(parts[0]), total + float(sum(part.sum() for part in parts))

    results = await strategy.run(eat, args=(iterator,))
    return list(strategy.experimental_local_results(results))


def a_client_is_lost() -> None:
    """The program that trains dies; another client sees that nothing of it stays."""
    with distributed.LocalCluster(n_workers=2, **SERIAL) as engine:
        program = [sys.executable, __file__, "trains_until_killed", engine.scheduler_address]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as trains:
            assert trains.stdout is not None
            trains.stdout.readline()
            with distributed.Client(engine) as client:
                there = list(itertools.chain(*tasks_of(client).values()))
                trains.kill()
                say(there=len(there), left=left(client))


async def trains_until_killed() -> None:
    async with distributed.Client(sys.argv[2], asynchronous=True) as client:
        async with DaskCluster(client, 1, 2), counting_on_one():
            say(is_there=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    program = globals()[sys.argv[1]]
    if asyncio.iscoroutinefunction(program):
        asyncio.run(program())
    else:
        program()
