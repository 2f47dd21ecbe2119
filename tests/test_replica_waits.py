"""What waits for a backup, and for what a backup waits: given up meanwhile, it holds nobody up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from ps_cluster import until
from replica_cluster import ReplicaCluster, replicated
from test_replica_steps import SMALL, Training

import psync
from psync.rpc import Handler
from psync.wire.codec import Message
from psync.wire.recovery_messages import BackUp
from psync.wire.sync_messages import CloseStep


class Held:
    """Messages of one kind to one ps, which are late."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.go_on = asyncio.Event()


@contextlib.contextmanager
def held_up(cluster: ReplicaCluster, name: str, kind: type[Message]) -> Iterator[Held]:
    held = Held()
    handlers = cluster.ps(name)._endpoint.handlers
    handler = handlers[kind]

    async def later(peer: Any, message: Any, body: Any) -> Any:
        held.came.set()
        await held.go_on.wait()
        answer: Any = handler.run(peer, message, body)
        return await answer if asyncio.iscoroutine(answer) or asyncio.isfuture(answer) else answer

    handlers[kind] = Handler(later, handler.prepare)
    try:
        yield held
    finally:
        held.go_on.set()
        handlers[kind] = handler


def order_anew(coordinator: psync.ClusterCoordinator) -> None:
    """Let all backups be made anew, as after a fail-over: what was being made is given up."""
    replicas = coordinator._running("replicas").replicas
    assert replicas is not None
    replicas._pause()
    for ps in range(len(replicas._links)):
        replicas._note(ps, None, None)
    replicas.resume()


async def test_a_copy_that_is_given_up_while_a_step_is_closed_lets_steps_go_on() -> None:
    async with replicated() as (cluster, coordinator):
        training = Training(coordinator, SMALL)
        training.schedule(4)
        await coordinator.join()
        ordered: list[int] = []
        handlers = cluster.ps("ps-0")._endpoint.handlers
        handler = handlers[BackUp]

        def note(peer: Any, message: BackUp, body: Any) -> Any:
            ordered.append(message.epoch)
            return handler.run(peer, message, body)

        handlers[BackUp] = Handler(note, handler.prepare)
        with held_up(cluster, "ps-1", CloseStep) as held:
            training.schedule(4)
            await held.came.wait()
            for count in (1, 2):
                order_anew(coordinator)
                await until(lambda count=count: len(ordered) >= count)
                await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await coordinator.join()
            await coordinator.backed_up()
        await training.check()
