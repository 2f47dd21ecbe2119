"""Workers that are added to a running cluster, and removed from it.

A name and an address are checked here, before anybody is connected to; ``worker_links`` does the
rest.
"""

from __future__ import annotations

import asyncio
import itertools

from psync.chief.worker_links import WorkerLinks
from psync.cluster import ClusterSpec, parse_task_name
from psync.errors import ConfigurationError, DeadlineExceeded
from psync.net.environment import added_workers


async def add_worker(
    workers: WorkerLinks,
    cluster: ClusterSpec,
    address: str,
    index: int | None,
    timeout_s: float | None,
) -> str:
    """Take a worker into a running cluster; see ``ClusterCoordinator.add_worker``.

    Args:
        workers: The links to those that are there.
        cluster: As it was described at the start.
        address: Where the new one listens.
        index: What it calls itself; None: the lowest that no worker has.
        timeout_s: Seconds to wait for it; None: for ever.
    """
    known = {parse_task_name(name)[1]: at for name, at in workers.addresses().items()}
    if index is None:
        index = next(number for number in itertools.count() if number not in known)
    elif index in known:
        raise ConfigurationError(
            f"index: the cluster has a worker {index} already, at {known[index]}",
            hint="leave it out, or give the task index that the new worker's TF_CONFIG names",
        )
    # Is it an address, and nobody else's? Is the index one?
    ClusterSpec({**cluster.as_dict(), "worker": {**known, index: address}})
    name = await workers.add(address, index, timeout_s)
    added = added_workers.get()
    if added is not None:
        added[name] = address
    return name


async def remove_worker(workers: WorkerLinks, task: str, timeout_s: float | None) -> None:
    """Let a worker leave for good; see ``ClusterCoordinator.remove_worker``."""
    known = workers.addresses()
    if task not in known:
        raise ConfigurationError(
            f"task: expected a worker of the cluster ({', '.join(known)}), got {task!r}"
        )
    try:
        async with asyncio.timeout(timeout_s):
            await workers.remove(task, "the program removes it")
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"{task} has not left within {timeout_s:g} s: what it runs has not ended",
            hint="it leaves when that has; wait again, or give it up by stopping its process",
        ) from exc
    added = added_workers.get()
    if added is not None:
        added.pop(task, None)
