"""A psync cluster on Ray: each ps and each worker is an actor of Ray's.

    from psync.integrations.ray import RayCluster

    async with RayCluster(2, 4, resources_per_worker={"CPU": 2}):
        strategy = psync.ParameterServerStrategy()
        async with psync.ClusterCoordinator(strategy) as coordinator:
            ...

This process, a driver of Ray's, a task or an actor, is the chief. ``dataset`` gives a
``ray.data.Dataset`` to the workers, block by block.

What Ray writes down of an actor, so as to make it again, has no secret: the actor is made with its
name, and gets the rest by a call each time that it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from psync.errors import ConfigurationError
from psync.integrations.engines import HostedTask, Order, SeatLost, TasksOnEngine
from psync.launch.cluster import Host, TaskCluster
from psync.launch.process import configure_logging
from psync.net.chief_presence import naming_who_is_awaited

try:
    import ray
    from ray.exceptions import ActorDiedError, RayActorError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from psync.integrations.ray_data import dataset as dataset
except ImportError as exc:
    raise ConfigurationError(
        f"psync.integrations.ray needs the package ray, which cannot be imported here: {exc}",
        hint="pip install 'psync[ray]', on the chief and on every node",
    ) from exc

__all__ = ["RayCluster", "dataset"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

PLACEMENTS = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")

LOOK_AGAIN_S = 1
"""Seconds between two looks whether Ray has room, or has started an actor again."""


class RayCluster(TaskCluster):
    """ps and worker tasks as actors of Ray; this process is the chief.

    An async context manager like ``psync.LocalCluster``, with the same ``resolver``, ``scale`` and
    ``adapt``; inside, ``ParameterServerStrategy()`` uses this cluster. Unless the program has
    connected to Ray, it connects as ``ray.init()`` does: by ``RAY_ADDRESS``, or to a new Ray
    instance.

    Each ps and each worker listens at its node's address. When an actor's process or node is lost,
    Ray restarts it, on another node if necessary, and all tasks find it there. A ps comes back
    empty, and recovers from its backup ps or a checkpoint as usual. Ray forwards prints and log
    lines of tasks to the driver, with the task's name.

    Args:
        num_ps: Number of ps tasks, at least 1.
        num_workers: Number of workers, at least 1.
        resources_per_ps: Resources that Ray reserves for each ps, as in ``{"CPU": 1, "memory":
            2**30}``: a bundle of a placement group. Default: one CPU.
        resources_per_worker: Resources for each worker: ``{"CPU": 2, "GPU": 1}``. A worker sees
            only its own GPUs. Default: one CPU.
        placement: How ps tasks are placed on nodes, a strategy of Ray's placement groups:
            ``"SPREAD"``, on as many nodes as possible; ``"STRICT_SPREAD"``, each on a different
            one; ``"PACK"``, ``"STRICT_PACK"``. Workers are spread.
        max_restarts: Number of restarts per minute of each task; a task that dies once more is
            given up. 0: Ray restarts none.
        plugins: Modules with custom rules, which this process and all tasks load; they must be
            present on each node, for example by Ray's ``runtime_env``.
        timeout: Seconds to wait, when the cluster starts, until Ray has room for all tasks.

    Raises:
        ConfigurationError: An argument is invalid. From ``start``: the connection to Ray fails, Ray
            has no room in time (the message says what it has), or a plugin cannot be imported.

    Cancellation: A cancelled ``start`` ends everything that was started.

    Example:
        async with RayCluster(2, 4) as cluster:
            strategy = psync.ParameterServerStrategy(cluster.resolver)

    Source: actors, placement groups and ``max_restarts`` of Ray.
    """

    def __init__(
        self,
        num_ps: int,
        num_workers: int,
        *,
        resources_per_ps: Mapping[str, float] | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        placement: str = "SPREAD",
        max_restarts: int = 3,
        plugins: Sequence[str] = (),
        timeout: float = 300.0,
    ) -> None:
        super().__init__(num_ps, num_workers, plugins)
        if placement not in PLACEMENTS:
            raise ConfigurationError(
                f"placement: expected one of {', '.join(PLACEMENTS)}, got {placement!r}"
            )
        if type(max_restarts) is not int or max_restarts < 0:
            raise ConfigurationError(
                f"max_restarts: expected a whole number, 0 or above, got {max_restarts!r}"
            )
        if not timeout > 0:
            raise ConfigurationError(f"timeout: expected seconds above 0, got {timeout!r}")
        self._bundles = {
            "ps": _bundle("resources_per_ps", resources_per_ps),
            "worker": _bundle("resources_per_worker", resources_per_worker),
        }
        self._placement = placement
        self._max_restarts = max_restarts
        self._timeout = timeout

    async def _make_host(self, resources: contextlib.AsyncExitStack) -> Host:
        if not ray.is_initialized():
            await asyncio.to_thread(_connect)
        engine = _Ray(self._counts, self._bundles, self._placement, self._max_restarts)
        resources.push_async_callback(engine.close)
        await engine.reserve(self._timeout)
        host = TasksOnEngine(engine, {**os.environ, **self._plugins}, self._max_restarts)
        resources.push_async_callback(host.close)
        return host


def _bundle(argument: str, given: Mapping[str, float] | None) -> dict[str, float]:
    bundle = {"CPU": 1.0} if given is None else dict(given)
    for name, amount in bundle.items():
        if (
            not isinstance(name, str)
            or isinstance(amount, bool)
            or not isinstance(amount, int | float)
        ):
            raise ConfigurationError(
                f'{argument}: expected amounts by name, as in {{"CPU": 1}}, got {given!r}'
            )
    bundle = {name: amount for name, amount in bundle.items() if amount > 0}
    if not bundle:
        raise ConfigurationError(
            f"{argument}: expected at least one amount, got {given!r}",
            hint='use {"CPU": 0.01} for almost none',
        )
    return bundle


def _connect(address: str | None = None) -> None:
    try:
        ray.init(address=address, logging_level="error")
    except Exception as exc:  # of any kind; what to do is the same
        where = address or os.environ.get("RAY_ADDRESS")
        raise ConfigurationError(
            f"Ray cannot be connected to{'' if where is None else f' at {where}'}: {exc}",
            hint="set RAY_ADDRESS or psync run --address to HOST:6379; this process must run on a "
            "node of that cluster",
        ) from exc


@contextlib.asynccontextmanager
async def cluster_of_command(
    num_ps: int,
    num_workers: int,
    *,
    address: str | None,
    gpus_per_worker: int | None,
    max_restarts: int,
) -> AsyncIterator[RayCluster]:
    """Return the cluster of ``psync run --on ray``, as a context manager.

    Raises:
        ConfigurationError: The connection to Ray fails.
    """
    await asyncio.to_thread(_connect, address)
    resources = {"CPU": 1.0, "GPU": float(gpus_per_worker or 0)}
    async with RayCluster(
        num_ps, num_workers, resources_per_worker=resources, max_restarts=max_restarts
    ) as cluster:
        yield cluster


# On the nodes.


class _Task:
    """The actor of one task.

    Args:
        name: As in ``ps-0``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: HostedTask | None = None
        self._address = ""

    def __repr__(self) -> str:  # Ray puts it before each line of output
        return self._name

    async def is_here(self) -> bool:
        """Answer."""
        return True

    async def begin(self, order: Order) -> str:
        """Run the task, unless it runs; return where it listens."""
        if self._task is None or self._task.has_ended:
            configure_logging(order.environ.get("PSYNC_LOG_LEVEL", "info"))
            self._task = HostedTask(order, ray.util.get_node_ip_address())
            self._address = await self._task.begin()
        return self._address

    async def ended(self) -> str:
        """Wait for the end of the task."""
        if self._task is None:  # this is another process than the one that has begun it
            return "its process was lost"
        return await self._task.ended()

    async def know(self, places: Mapping[str, str]) -> None:
        """Others have moved."""
        if self._task is not None:
            self._task.know(places)

    async def leave(self) -> None:
        """Let a worker leave."""
        if self._task is not None:
            await self._task.leave()

    async def stop(self) -> None:
        """End the task."""
        if self._task is not None:
            await self._task.stop()


# On the chief.


class _Actor:
    """A seat: an actor, which Ray starts again when its process or node is lost.

    Args:
        actor: Its handle.
        own: The placement group that was made for it alone, if one was.
    """

    def __init__(self, actor: Any, own: PlacementGroup | None) -> None:
        self._actor = actor
        self._own = own

    async def begin(self, order: Order) -> str:
        """Run a task; see ``Seat``."""
        name = f"{order.job}-{order.index}"
        with naming_who_is_awaited(lambda: f"{name} waits for Ray to start its actor"):
            while True:
                try:
                    await _answer(self._actor.is_here.remote())
                    break
                except SeatLost as exc:
                    if exc.is_final:
                        raise
                await asyncio.sleep(LOOK_AGAIN_S)
        address: str = await _answer(self._actor.begin.remote(order))
        return address

    async def ended(self) -> str:
        """Wait for the end of the task; see ``Seat``."""
        failure: str = await _answer(self._actor.ended.remote())
        return failure

    async def know(self, places: Mapping[str, str]) -> None:
        """Say where others are; see ``Seat``."""
        await _answer(self._actor.know.remote(dict(places)))

    async def leave(self) -> None:
        """Let a worker leave; see ``Seat``."""
        await _answer(self._actor.leave.remote())

    async def close(self) -> None:
        """End the task; see ``Seat``."""
        await _answer(self._actor.stop.remote())

    async def abandon(self) -> None:
        """End the actor; see ``Seat``."""
        with contextlib.suppress(Exception):  # Ray may have been shut down
            ray.kill(self._actor, no_restart=True)
            if self._own is not None:
                remove_placement_group(self._own)


async def _answer(reference: Awaitable[T]) -> T:
    """Return what an actor answers. Raises SeatLost if it cannot, and what it raised."""
    try:
        return await reference
    except ActorDiedError as exc:
        raise SeatLost(_in_short(exc), is_final=True) from None
    except RayActorError as exc:
        raise SeatLost(_in_short(exc)) from None
    except ray.exceptions.RayTaskError as exc:
        raise exc.cause from None


def _in_short(error: Exception) -> str:
    """Return the first sentence of what Ray says, and why the actor is dead, if it says that."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    why = [line for line in lines[1:] if line.startswith("The actor is dead because")]
    return " ".join([lines[0].partition(". ")[0], *why])


class _Ray:
    """The engine.

    Args:
        counts: Number of tasks of each job at the start.
        bundles: What each task of a job gets.
        placement: Of ps tasks.
        max_restarts: 0: no actor is started again.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        bundles: Mapping[str, dict[str, float]],
        placement: str,
        max_restarts: int,
    ) -> None:
        self.chief = ray.util.get_node_ip_address()
        self._counts = counts
        self._bundles = bundles
        self._strategies = {"ps": placement, "worker": "SPREAD"}
        self._actors = ray.remote(max_restarts=-1 if max_restarts else 0)(_Task)
        self._groups: dict[str, PlacementGroup] = {}

    async def reserve(self, timeout: float) -> None:
        """Reserve what all tasks need, at once for each job, ps tasks first.

        Raises:
            ConfigurationError: Ray has no room for it in time.
        """
        try:
            async with asyncio.timeout(timeout):
                for job, count in self._counts.items():
                    await self._reserve(job, count)
        except TimeoutError:
            has, free = ray.cluster_resources(), ray.available_resources()
            raise ConfigurationError(
                f"Ray has no room within {timeout:g} s for {self._described(job)}: it has "
                f"{_amounts(has)}, free: {_amounts(free)}",
                hint="run `ray status` to see used and requested resources",
            ) from None

    async def _reserve(self, job: str, count: int) -> None:
        strategy = self._strategies[job]
        group = placement_group([self._bundles[job]] * count, strategy=strategy)
        self._groups[job] = group
        with naming_who_is_awaited(lambda: f"Ray has no room yet for {self._described(job)}"):
            # Not ready(), which has Ray start a process to say so.
            while not await asyncio.to_thread(group.wait, LOOK_AGAIN_S):
                continue

    def _described(self, job: str) -> str:
        each = _amounts(self._bundles[job])
        return f"{self._counts[job]} {job} tasks of {each} each ({self._strategies[job]})"

    async def check(self, num_workers: int) -> None:
        """There may be room, or Ray makes it; see ``Engine``."""

    async def seat(self, job: str, index: int) -> _Actor:
        """Make an actor; see ``Engine``."""
        group, own = self._groups[job], None
        if index >= self._counts[job]:  # it was added
            group = own = placement_group([self._bundles[job]])
        strategy = PlacementGroupSchedulingStrategy(group, 0 if own is not None else index)
        bundle = dict(self._bundles[job])
        actor = self._actors.options(
            scheduling_strategy=strategy,
            num_cpus=bundle.pop("CPU", 0),
            num_gpus=bundle.pop("GPU", 0),
            memory=bundle.pop("memory", None),
            resources=bundle or None,
        ).remote(f"{job}-{index}")
        return _Actor(actor, own)

    async def close(self) -> None:
        """Give back what was reserved."""
        for group in self._groups.values():
            with contextlib.suppress(Exception):  # Ray may have been shut down
                remove_placement_group(group)


def _amounts(resources: Mapping[str, float]) -> str:
    shown = [f"{amount:g} {name}" for name, amount in resources.items() if "node:" not in name]
    return ", ".join(shown) or "nothing"
