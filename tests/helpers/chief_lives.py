"""One chief after another, in one process, for tests: to the other tasks an end is an end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psync
from inside import handlers_of
from memory_cluster import MemoryCluster
from psync.api.optimizers import optimizers_here
from psync.chief.events import FailoverEvent
from psync.net.peer import Handler
from psync.wire.codec import Message


def another_process() -> None:
    """What was made so far belongs to another process, as it does where a chief was killed."""
    optimizers_here().begin_process()


@contextlib.asynccontextmanager
async def life_of(
    strategy: psync.ParameterServerStrategy, *, attach: bool = True, **options: object
) -> AsyncIterator[psync.ClusterCoordinator]:
    """A chief, from its start to its end."""
    another_process()
    async with psync.ClusterCoordinator(strategy, attach=attach, **options) as coordinator:  # type: ignore[arg-type]
        yield coordinator


@contextlib.asynccontextmanager
async def backing_one_another_up(num_ps: int = 2) -> AsyncIterator[MemoryCluster]:
    """A cluster without a chief."""
    cluster = MemoryCluster(num_ps, 2)
    await cluster.start_all()
    try:
        yield cluster
    finally:
        await cluster.stop_all()


@contextlib.asynccontextmanager
async def life(
    cluster: MemoryCluster, *, attach: bool = True, **options: Any
) -> AsyncIterator[psync.ClusterCoordinator]:
    """A chief, until it dies: its connections break, and it says nothing more."""
    strategy = cluster.replica_strategy()
    async with life_of(strategy, attach=attach, **options) as coordinator:
        cluster.chief, cluster.fail_overs = coordinator, 0
        try:
            yield coordinator
        finally:
            silence(cluster, coordinator)


def silence(cluster: MemoryCluster, coordinator: psync.ClusterCoordinator) -> None:
    """Let a chief reach nobody any more."""

    async def refused(*_: object) -> Any:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the chief is dead")

    network: Any = coordinator.strategy.cluster_resolver.platform.network
    network.connect = refused
    cluster.network.cut("chief-0")


async def fail_over(cluster: MemoryCluster, *names: str, start_again: bool = True) -> None:
    """Let ps tasks die, one after the other, and the backups serve of what was served there.

    Each process is started again, and has backups only from then on.
    """
    for name in names:
        coordinator = cluster.chief
        await coordinator.backed_up()
        events = coordinator.events()
        for _ in range(cluster.fail_overs):
            await anext(events)
        await cluster.kill(name)
        assert isinstance(await anext(events), FailoverEvent)
        cluster.fail_overs += 1
        if start_again:
            await cluster.revive(name)


@contextlib.contextmanager
def at(
    cluster: MemoryCluster, name: str, kind: type[Message], do: Callable[[], Any]
) -> Iterator[asyncio.Event]:
    """Let something happen when a ps process gets a message, which goes its way then.

    If that returns False, the message is not heard. What is yielded is set when it came.
    """
    reached = asyncio.Event()
    handlers = handlers_of(cluster.ps(name))
    handler = handlers[kind]
    unheard: list[asyncio.Future[Any]] = []

    def run(peer: Any, message: Any, body: Any) -> Any:
        reached.set()
        if do() is not False:
            return handler.run(peer, message, body)
        unheard.append(asyncio.get_running_loop().create_future())
        return unheard[-1]

    handlers[kind] = Handler(run, handler.prepare)
    try:
        yield reached
    finally:
        handlers[kind] = handler
        for future in unheard:
            if not future.done():
                future.set_exception(psync.PsyncError("it was not heard"))
