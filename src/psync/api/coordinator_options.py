"""Options of a coordinator, validated; and what a program asks of a running cluster.

``add_worker``, ``remove_worker``, ``status``, ``trace`` and ``report`` are methods of
``ClusterCoordinator``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

from psync.closures.flapping import Flapping
from psync.cluster import ClusterSpec, parse_task_name
from psync.coordinator import CoordinatorOptions
from psync.errors import ConfigurationError, DeadlineExceeded
from psync.net.environment import added_workers
from psync.net.environment import watchdog_timeout as watchdog_timeout_here
from psync.net.trace import Trace, tracing

if TYPE_CHECKING:
    from psync.api.cluster_coordinator import ClusterCoordinator
    from psync.status.model import Status


MAX_REPORTED = 100
"""Names: a status has all of them each second, and so has a run log."""


def check_options(options: CoordinatorOptions, num_workers: int) -> None:
    """Refuse options of a coordinator that are out of range.

    Raises:
        ConfigurationError: One is.
    """
    if not 1 <= options.min_workers <= num_workers:
        raise ConfigurationError(
            f"min_workers: expected 1 to {num_workers}, got {options.min_workers}"
        )
    closure_timeout = options.closure_timeout_s
    if closure_timeout is not None and not closure_timeout > 0:
        raise ConfigurationError(
            f"closure_timeout: expected seconds above 0, got {closure_timeout}"
        )
    if options.max_losses < 1:
        raise ConfigurationError(f"max_losses: expected at least 1, got {options.max_losses}")
    Flapping(options.max_flaps)  # is it a limit?


def watchdog_timeout_of(given: float | None) -> float | None:
    """Return seconds, or None for no watchdog: as given, else as the environment says.

    Raises:
        ConfigurationError: What is given is no time; 0 stands for no watchdog.
    """
    if given is None:
        return watchdog_timeout_here()
    if not 0 <= given < math.inf:
        raise ConfigurationError(f"watchdog_timeout: expected seconds, 0 or above, got {given}")
    return given or None


async def add_worker(
    self: ClusterCoordinator,
    address: str,
    *,
    index: int | None = None,
    timeout: float | None = 60.0,
) -> str:
    """Add a worker that was not in the cluster at the start; return its task name.

    The worker serves under that name. Its ``TF_CONFIG`` or resolver may name only itself:
    ``{"cluster": {"worker": {"3": "host:port"}}, "task": {"type": "worker", "index": 3}}``. From
    then on it is like the others: it gets closures, is reconnected when it is lost, takes part in
    the next ``strategy.run``, and is told to exit at the end of ``psync.run``.

    Existing datasets and variables keep the number of workers they were made for. The new worker
    reads the share of worker ``get_worker_index() % number``, from the beginning, and shares that
    worker's copy of a variable that is synchronized on read.

    Args:
        address: Address at which the worker listens.
        index: Task index; None: the lowest free index of the cluster.
        timeout: Seconds to wait for the worker, which may still be starting. None: no limit.

    Raises:
        ConnectFailed: The worker is not there in time. It is not added.
        ConfigurationError: The address or the index is malformed, or belongs to another task.
        ProtocolError: Another task answers there, such as a worker with another index.
        AuthenticationError: The worker holds a different secret.
        ClosedError: The coordinator is not running.

    Cancellation: The worker is not added.
    """
    coordinator, cluster = self._running("add_worker"), self.strategy.cluster
    workers = coordinator.links.workers
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
    try:
        name = await workers.add(address, index, timeout)
    finally:
        coordinator.recovery.fail_if_gone()  # it may have been the last hope
    added = added_workers.get()
    if added is not None:
        added[name] = address
    return name


async def remove_worker(self: ClusterCoordinator, task: str, timeout: float | None = None) -> None:
    """Ask a worker to leave, and wait until it has left; its process exits with code 0.

    The worker gives back closures that it has not begun and finishes the one it runs. An
    unreachable worker is removed at once. Its index becomes free. Its share of per-worker datasets
    is no longer read.

    Args:
        task: Task name, such as ``/job:worker/task:3``.
        timeout: Seconds to wait; None: as long as its closure takes.

    Raises:
        ConfigurationError: The cluster has no such worker.
        DeadlineExceeded: The worker has not left in time; it leaves when its closure ends.
        ClosedError: The coordinator is not running.

    Cancellation: The worker leaves all the same.
    """
    coordinator = self._running("remove_worker")
    workers = coordinator.links.workers
    known = workers.addresses()
    if task not in known:
        raise ConfigurationError(
            f"task: expected a worker of the cluster ({', '.join(known)}), got {task!r}"
        )
    try:
        async with asyncio.timeout(timeout):
            await workers.remove(task, "the program removes it")
    except TimeoutError as exc:
        raise DeadlineExceeded(
            f"{task} has not left within {timeout:g} s: what it runs has not ended",
            hint="it leaves once the closure ends; wait again, or stop its process to remove it "
            "now",
        ) from exc
    coordinator.recovery.fail_if_gone()
    added = added_workers.get()
    if added is not None:
        added.pop(task, None)


async def status(self: ClusterCoordinator) -> Status:
    """Return the present state of the cluster: workers, ps tasks, steps, closures, recent events.

    - Rates are averages over the last five seconds.
    - All ps tasks are asked at the same time, at most once in 0.2 s. A ps that does not answer
      within a second keeps its previous numbers, which then have an age.
    - Workers are not asked, so a computing step delays nothing.
    - The queue, the workers and their closures are as of this call: right after ``join``,
      ``queue.finished`` includes all joined closures.

    ``psync top`` shows the status from outside.

    Raises:
        ClosedError: The coordinator is not running.

    Cancellation: Safe.

    Example:
        status = await coordinator.status()
        for worker in status.workers:
            print(worker.task, worker.state, worker.closures_per_s)
    """
    self._running("status")
    return await self._seen.source.status()


@contextlib.asynccontextmanager
async def trace(
    self: ClusterCoordinator, path: str | os.PathLike[str]
) -> AsyncGenerator[Trace, None]:
    """Return a context that records a trace into a file, for ui.perfetto.dev or chrome://tracing.

    Each task is a process in the trace: the steps of workers with their pulls, pushes, waits and
    computation; requests, on the sending and the serving side; synchronous steps and counters. The
    clocks of tasks are aligned. Nothing is recorded outside the context. ``docs/seeing.md``
    explains how to read a trace; ``psync trace`` records one from outside.

    Args:
        path: Path of the file; an existing file is replaced.

    Yields:
        An object whose ``summary`` has, afterwards, seconds, events, tasks, and dropped events.

    Raises:
        ConfigurationError: The file cannot be written.
        ClosedError: The coordinator is not running.

    Cancellation: The events recorded so far are written.

    Example:
        async with coordinator.trace("out.json"):
            for _ in range(100):
                coordinator.schedule(step)
            await coordinator.join()
    """
    self._running("trace")
    source = self._seen.source
    async with tracing(source.spans.read, source.program, path) as traced:
        yield traced


def report(self: ClusterCoordinator, values: Mapping[str, float]) -> None:
    """Show the program's own values in its status: the loss, the epoch, an accuracy.

    ``Trainer.fit`` does this automatically; call it in custom loops. The status shows the newest
    value of each name.

    Args:
        values: Numbers by name; of more than 100 names the newest are shown.

    Raises:
        ConfigurationError: A value is not a number.
        ClosedError: The coordinator is not running.

    Example:
        coordinator.report({"epoch": epoch, "loss": np.mean(await coordinator.fetch(losses))})
    """
    self._running("report")
    for name, value in values.items():
        try:
            self._seen.source.reported[str(name)] = float(value)
        except (TypeError, ValueError) as exc:
            raise ConfigurationError(f"report: {name}: expected a number, got {value!r}") from exc
    reported = self._seen.source.reported
    for name in list(reported)[:-MAX_REPORTED]:  # of names that are new with every step
        del reported[name]
