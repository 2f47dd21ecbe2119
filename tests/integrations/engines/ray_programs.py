"""Programs of test_ray.py: drivers of Ray. The first argument names the one to run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray

import psync
from counting import count_of, counting, holds, places_of, process_at, say, schedule
from psync.errors import ConfigurationError
from psync.integrations.ray import RayCluster, dataset


async def a_node_is_removed() -> None:
    async with RayCluster(2, 2) as cluster:
        before = places_of(cluster)
        async with counting(ps_recovery="backup") as (coordinator, v):
            schedule(coordinator, v, 300)
            say(remove=before["ps-1"].partition(":")[0])
            schedule(coordinator, v, 300)
            await coordinator.join()
            counted = await count_of(v)
            while not moved(before, places_of(cluster)):  # noqa: ASYNC110  # it takes Ray a while
                await asyncio.sleep(0.1)
            schedule(coordinator, v, 100)
            await coordinator.join()
            say(
                before=before,
                after=places_of(cluster),
                counted=[counted, await count_of(v)],
                name=cluster.resolver.cluster_spec().task_address("ps", 1),
            )


def moved(before: dict[str, str], now: dict[str, str]) -> bool:
    """Whether all tasks are there, and none on the node that ps 1 was on."""
    lost = before["ps-1"].partition(":")[0]
    return len(now) == len(before) and not any(at.startswith(f"{lost}:") for at in now.values())


async def a_ps_is_killed() -> None:
    """It comes back empty at another port, and all go back to the checkpoint."""
    async with RayCluster(2, 1) as cluster:
        async with counting() as (coordinator, v):
            manager = psync.CheckpointManager(psync.Checkpoint(v=v), sys.argv[2], max_to_keep=1)
            schedule(coordinator, v, 20)
            await coordinator.join()
            await manager.save()
            place = places_of(cluster)["ps-0"]
            os.kill(process_at(place), signal.SIGKILL)
            schedule(coordinator, v, 20)
            await coordinator.join()
            counted = await count_of(v)
            say(counted=counted, before=place, after=places_of(cluster)["ps-0"])


async def all_else() -> None:
    async with RayCluster(2, 2, resources_per_ps={"CPU": 0.5, "memory": 2**20}) as cluster:
        say(places=places_of(cluster), tasks=repr(cluster))
        async with counting() as (coordinator, v):
            await asyncio.gather(*(part(cluster, coordinator, v) for part in (scaling, prints)))
            secret = cluster.resolver.platform.secret.value
            say(secret_in=where_is(secret), secret_here=holds(os.getpid(), secret))
    try:
        async with RayCluster(1, 1, resources_per_worker={"CPU": 1000}, timeout=1.0):
            pass
    except ConfigurationError as exc:
        say(no_room=str(exc))


async def scaling(cluster: RayCluster, coordinator: psync.ClusterCoordinator, v: Any) -> None:
    await cluster.scale(3)
    schedule(coordinator, v, 60)
    await coordinator.join()
    say(scaled=sorted(places_of(cluster)), counted=await count_of(v))
    await cluster.scale(2)


async def prints(cluster: RayCluster, coordinator: psync.ClusterCoordinator, v: Any) -> None:
    async def step() -> str:
        print("printed in a step", flush=True)
        return ray.util.get_node_ip_address()

    value = coordinator.schedule(step)
    say(step_on=await value.fetch())


async def blocks() -> None:
    """Each row once, on the worker that has its block."""
    async with RayCluster(1, 2), counting() as (coordinator, _):
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = dataset(ray.data.from_numpy(np.arange(1000.0)).repartition(8), 50, shuffle_seed=3)
        strategy = coordinator.strategy
        batches = strategy.experimental_distribute_dataset(rows)
        iterator = iter(coordinator.create_per_worker_dataset(batches))

        def eat(iterator: Any) -> tuple[int, float]:
            seen, total = 0, 0.0
            while True:
                try:
                    batch = next(iterator)
                except psync.EndOfData:
                    return seen, total
                seen, total = seen + len(batch["data"]), total + float(batch["data"].sum())

        results = await strategy.run(eat, args=(iterator,))
        spec = {name: list(leaf.shape) for name, leaf in rows.element_spec.items()}
        say(eaten=strategy.experimental_local_results(results), spec=spec)
        try:
            dataset([1, 2, 3], 50)
        except ConfigurationError as exc:
            say(no_dataset=exc.message)


def where_is(secret: bytes) -> list[str]:
    """Look for the secret in what Ray writes down, and in the processes that are Ray's own."""
    found = []
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    files = [path for path in session.rglob("*") if path.is_file()]
    found += [str(path) for path in files if secret in path.read_bytes()]
    looked_at = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            shown = command + (folder / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if secret in shown:
            found.append(command.decode())
        for name in (b"gcs/gcs_server", b"raylet/raylet"):  # with the object store
            if name in command.partition(b"\0")[0]:
                looked_at.add(name.decode())
                if holds(int(folder.name), secret):
                    found.append(f"memory of {command.decode()}")
    say(looked_at=sorted(looked_at))
    return found


def inside_a_task() -> None:
    """The training function runs in a task of Ray's, on whichever node."""

    async def train() -> float:
        async with RayCluster(1, 1), counting() as (coordinator, v):
            schedule(coordinator, v, 20)
            await coordinator.join()
            return await count_of(v)

    ray.init(logging_level="error")
    say(counted=ray.get(ray.remote(num_cpus=0)(lambda: asyncio.run(train())).remote()))


if __name__ == "__main__":
    program = globals()[sys.argv[1]]
    if asyncio.iscoroutinefunction(program):
        asyncio.run(program())
    else:
        program()
