"""A psync cluster on the workers of a Dask cluster.

    from psync.integrations.dask import DaskCluster

    async with DaskCluster(client, 2, 4):
        strategy = psync.ParameterServerStrategy()
        async with psync.ClusterCoordinator(strategy) as coordinator:
            ...

The process of the client is the chief. ``dataset`` gives Dask arrays and dataframes to the workers,
partition by partition.

For Dask, each ps and each worker is one long task, pinned to one Dask worker: it shows on the
dashboard, has seceded from the worker's threads, and is not stolen. What the task is to run it gets
by a call out of band (``Client.run``), which the scheduler passes on and does not keep: a task's
arguments are state of the scheduler, where the cluster's secret has no place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from psync.errors import ConfigurationError, PsyncError
from psync.integrations.engines import Order, SeatLost, TasksOnEngine
from psync.launch.cluster import Host, TaskCluster
from psync.net.chief_presence import naming_who_is_awaited

try:
    import distributed
    from distributed.comm import get_address_host

    from psync.integrations import dask_tasks
    from psync.integrations.dask_data import dataset as dataset
except ImportError as exc:
    raise ConfigurationError(
        "psync.integrations.dask needs the packages dask and distributed, which cannot be imported "
        f"here: {exc}",
        hint="pip install 'psync[dask]', on the chief and on every Dask worker",
    ) from exc

__all__ = ["DaskCluster", "dataset"]

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
"""Between two looks at Dask's workers, while there is none."""


class DaskCluster(TaskCluster):
    """ps and worker tasks on the workers of a Dask cluster; this process is the chief.

    An async context manager like ``psync.LocalCluster``, with the same ``resolver``, ``scale`` and
    ``adapt``; inside, ``ParameterServerStrategy()`` uses this cluster.

    Tasks are spread over Dask workers, ps tasks first over machines. If there are more tasks than
    Dask workers, several tasks share a process, and Python's lock. When a Dask worker is lost, its
    task restarts on another one, or on the one that Dask's nanny starts, and all tasks find it
    there. A ps comes back empty, and recovers from its backup ps or a checkpoint as usual. When the
    cluster stops, or the client is closed or lost, the tasks end and leave nothing on scheduler and
    workers.

    Args:
        client: A ``distributed.Client``, synchronous or not, that stays open meanwhile.
        num_ps: Number of ps tasks, at least 1.
        num_workers: Number of workers, at least 1.
        workers: Addresses of the Dask workers to use, as in the client's scheduler. None: all,
            including later ones.
        max_restarts: Number of restarts per minute of each task; a task whose Dask worker is lost
            once more is given up.
        plugins: Modules with custom rules, which this process and all tasks load; they must be
            present on each Dask worker, for example by ``client.upload_file``.

    Raises:
        ConfigurationError: An argument is invalid. From ``start``: Dask has no worker, or a plugin
            cannot be imported.

    Cancellation: A cancelled ``start`` ends everything that was started.

    Example:
        with distributed.Client("scheduler:8786") as client:
            asyncio.run(train(client))  # async with DaskCluster(client, 2, 4): …

    Source: ``Client.submit`` with ``workers=``, ``Client.run`` and ``secede`` of distributed.
    """

    def __init__(
        self,
        client: distributed.Client,
        num_ps: int,
        num_workers: int,
        *,
        workers: Sequence[str] | None = None,
        max_restarts: int = 3,
        plugins: Sequence[str] = (),
    ) -> None:
        super().__init__(num_ps, num_workers, plugins)
        if not isinstance(client, distributed.Client):
            raise ConfigurationError(
                f"client: expected a distributed.Client, got {type(client).__name__}",
                hint="DaskCluster(client, num_ps, num_workers)",
            )
        if type(max_restarts) is not int or max_restarts < 0:
            raise ConfigurationError(
                f"max_restarts: expected a whole number, 0 or above, got {max_restarts!r}"
            )
        self._client = client
        self._allowed = None if workers is None else tuple(workers)
        self._max_restarts = max_restarts

    async def _make_host(self, resources: contextlib.AsyncExitStack) -> Host:
        engine = _Dask(self._client, self._allowed)
        await engine.check(1)
        host = TasksOnEngine(engine, {**os.environ, **self._plugins}, self._max_restarts)
        resources.push_async_callback(host.close)
        return host


@contextlib.asynccontextmanager
async def cluster_of_command(
    num_ps: int,
    num_workers: int,
    *,
    address: str | None,
    gpus_per_worker: int | None,
    max_restarts: int,
) -> AsyncIterator[DaskCluster]:
    """Return the cluster of ``psync run --on dask``, as a context manager.

    Raises:
        ConfigurationError: No scheduler answers there.
    """
    if gpus_per_worker is not None:
        raise ConfigurationError(
            "--gpus-per-worker: Dask decides which GPUs a Dask worker sees",
            hint="dask-cuda starts a Dask worker for each GPU",
        )
    try:
        client = await distributed.Client(address, asynchronous=True)
    except (OSError, ValueError) as exc:
        where = "" if address is None else f" at {address}"
        raise ConfigurationError(
            f"Dask's scheduler is unreachable{where}: {exc}",
            hint="--address tcp://HOST:8786, or DASK_SCHEDULER_ADDRESS",
        ) from exc
    async with (
        client,
        DaskCluster(client, num_ps, num_workers, max_restarts=max_restarts) as cluster,
    ):
        yield cluster


class _Dask:
    """The engine.

    Args:
        client: Of the Dask cluster.
        allowed: Addresses of Dask workers; None: all.
    """

    def __init__(self, client: distributed.Client, allowed: Sequence[str] | None) -> None:
        self._client = client
        self._allowed = allowed
        self.taken: dict[tuple[str, int], str] = {}  # Dask worker of each task
        self.chief = "127.0.0.1"  # nobody connects to it

    async def check(self, num_workers: int) -> None:
        """Is there a Dask worker? See ``Engine``."""
        if not await self._workers():
            raise ConfigurationError(
                f"Dask has no worker{'' if self._allowed is None else ' of those that were named'}",
                hint="call client.wait_for_workers(2) first",
            )

    async def seat(self, job: str, index: int) -> _DaskTask:
        """Return a place for a task; which Dask worker that is, is decided when it begins."""
        return _DaskTask(self, job, index)

    async def on_client(self, call: Callable[[distributed.Client], Any]) -> Any:
        """Return what a call of the client's returns, which is done on its loop, and not here.

        Raises:
            SeatLost: It has failed, but for an error of ours.
        """

        async def calling() -> Any:
            return await call(self._client)

        loop = self._client.loop.asyncio_loop
        try:
            if loop is asyncio.get_running_loop():
                return await calling()
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(calling(), loop))
        except PsyncError:
            raise
        except Exception as exc:  # whatever it met on its way to the worker
            raise SeatLost(f"{type(exc).__name__}: {exc}") from exc

    async def out_of_band(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a Dask worker. Raises SeatLost."""
        results = await self.on_client(lambda client: client.run(function, *args, workers=[worker]))
        return results[worker]

    async def _workers(self) -> list[str]:
        known = await self.on_client(lambda client: client.ncores())
        return [each for each in known if self._allowed is None or each in self._allowed]

    async def is_there(self, worker: str) -> bool:
        """Whether Dask has this worker still."""
        return worker in await self._workers()

    async def choose(self, job: str, index: int) -> str:
        """Return the Dask worker for a task, and note it. Waits for one if there is none."""
        self.taken.pop((job, index), None)
        with naming_who_is_awaited(lambda: f"{job}-{index} waits for a Dask worker"):
            while not (workers := await self._workers()):  # noqa: ASYNC110  # Dask has no event
                await asyncio.sleep(LOOK_AGAIN_S)
        of_job = [worker for (kind, _), worker in self.taken.items() if kind == job]
        machines = Counter(map(get_address_host, of_job))
        mine, all_tasks = Counter(of_job), Counter(self.taken.values())

        def load(worker: str) -> tuple[int, ...]:
            on_machine = machines[get_address_host(worker)]
            # A ps is spread over machines, a worker needs a process of its own first.
            first = (on_machine, mine[worker]) if job == "ps" else (mine[worker], on_machine)
            return (*first, all_tasks[worker])

        chosen = self.taken[job, index] = min(workers, key=load)
        return chosen


class _DaskTask:
    """A seat: a Dask task that is pinned to a worker, and another one when that is lost."""

    def __init__(self, engine: _Dask, job: str, index: int) -> None:
        self._engine = engine
        self._job, self._index = job, index
        self._worker = ""  # Dask's
        self._token = ""
        self._future: distributed.Future | None = None

    async def begin(self, order: Order) -> str:
        """Run a task; see ``Seat``."""
        await self.abandon()
        worker = self._worker = await self._engine.choose(self._job, self._index)
        token = self._token = uuid.uuid4().hex

        async def submit(client: distributed.Client) -> distributed.Future:
            return client.submit(
                dask_tasks.keep, token, key=f"psync-{self._job}-{self._index}-{token[:8]}",
                workers=[worker], allow_other_workers=False, pure=False, retries=0,
            )  # fmt: skip

        self._future = await self._engine.on_client(submit)
        waiting = f"{self._job}-{self._index} waits for a thread of Dask worker {worker}"
        with naming_who_is_awaited(lambda: waiting):
            address: str = await self._call(dask_tasks.begin, order)
        return address

    async def ended(self) -> str:
        """Wait for the end of the task; see ``Seat``."""
        while True:
            try:
                failure: str = await self._call(dask_tasks.ended)
                return failure
            except SeatLost as exc:
                if not await self._engine.is_there(self._worker):
                    raise SeatLost(f"Dask worker {self._worker} is lost") from exc
            await asyncio.sleep(LOOK_AGAIN_S)  # only the connection was lost

    async def know(self, places: Mapping[str, str]) -> None:
        """Say where others are; see ``Seat``."""
        await self._call(dask_tasks.know, dict(places))

    async def leave(self) -> None:
        """Let a worker leave; see ``Seat``."""
        await self._call(dask_tasks.leave)

    async def close(self) -> None:
        """End the task; see ``Seat``."""
        future = self._future
        if future is not None:
            await self._call(dask_tasks.stop)
            await self._engine.on_client(lambda client: future)  # Dask's task has ended, too

    async def abandon(self) -> None:
        """Let go of Dask's task; see ``Seat``."""
        self._engine.taken.pop((self._job, self._index), None)
        future, self._future = self._future, None
        if future is None:
            return
        with contextlib.suppress(SeatLost):  # the scheduler has gone
            if future.done():
                future.release()
            else:
                await self._engine.on_client(lambda client: client.cancel([future], force=True))

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._engine.out_of_band(self._worker, function, self._token, *args)
