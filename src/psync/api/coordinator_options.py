"""Options of a coordinator, validated; and workers added to, or removed from, a running cluster.

Workers that are added to a running cluster, and removed from it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from psync.chief.worker_links import WorkerLinks
from psync.closures.flapping import Flapping
from psync.cluster import ClusterSpec, parse_task_name
from psync.errors import ConfigurationError, DeadlineExceeded
from psync.net.environment import added_workers
from psync.net.environment import watchdog_timeout as watchdog_timeout_here


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """As the arguments of ``ClusterCoordinator``, which explains them."""

    min_workers: int
    connect_timeout_s: float
    ps_timeout_s: float
    closure_timeout_s: float | None  # None: a step may take as long as it likes
    max_losses: int
    max_flaps: int | None  # None: as often as it likes
    watchdog_timeout_s: float | None  # None: there is no watchdog
    on_stall: Callable[[str], object] | None
    insecure: bool
    attach: bool


def checked_options(
    num_workers: int,
    *,
    min_workers: int | None,
    connect_timeout: float,
    ps_timeout: float,
    closure_timeout: float | None,
    max_losses: int,
    max_flaps: int | None,
    watchdog_timeout: float | None,
    on_stall: Callable[[str], object] | None,
    insecure: bool,
    attach: bool,
) -> CoordinatorOptions:
    """Return the options of a coordinator, with what the environment says where nothing is given.

    Args:
        num_workers: Workers of the cluster.
        min_workers: See ``ClusterCoordinator``, also for all that follow.
        connect_timeout: Seconds.
        ps_timeout: Seconds.
        closure_timeout: Seconds, or None.
        max_losses: At least 1.
        max_flaps: A number, or None.
        watchdog_timeout: Seconds, 0, or None: as the environment says.
        on_stall: Called with a text.
        insecure: A bool.
        attach: A bool.

    Raises:
        ConfigurationError: One is out of range.
    """
    if min_workers is not None and not 1 <= min_workers <= num_workers:
        raise ConfigurationError(f"min_workers: expected 1 to {num_workers}, got {min_workers}")
    if closure_timeout is not None and not closure_timeout > 0:
        raise ConfigurationError(
            f"closure_timeout: expected seconds above 0, got {closure_timeout}"
        )
    if max_losses < 1:
        raise ConfigurationError(f"max_losses: expected at least 1, got {max_losses}")
    Flapping(max_flaps)  # is it a limit?
    return CoordinatorOptions(
        min_workers=num_workers if min_workers is None else min_workers,
        connect_timeout_s=connect_timeout,
        ps_timeout_s=ps_timeout,
        closure_timeout_s=closure_timeout,
        max_losses=max_losses,
        max_flaps=max_flaps,
        watchdog_timeout_s=_watchdog_timeout(watchdog_timeout),
        on_stall=on_stall,
        insecure=insecure,
        attach=attach,
    )


def _watchdog_timeout(given: float | None) -> float | None:
    if given is None:
        return watchdog_timeout_here()
    if not 0 <= given < math.inf:
        raise ConfigurationError(f"watchdog_timeout: expected seconds, 0 or above, got {given}")
    return given or None


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
        index: Its task index; None: the lowest that no worker has.
        timeout_s: Seconds to wait for it; None: no limit.
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
    """Remove a worker for good; see ``ClusterCoordinator.remove_worker``."""
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
