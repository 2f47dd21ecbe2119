"""The inside of tasks: the one place in the tests that knows which parts a task is made of.

A test that needs a part by itself, to hold it up or to give it something from below, asks here:
when a task is arranged anew, this file changes and no test does. What a task says by itself, in
``statistics()``, ``describe()`` and to its clients, is the better question where it answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from psync.backups.host import BackupHost
from psync.client.link import PsLink
from psync.net.connection import Connection, Handler
from psync.net.endpoint import Endpoint
from psync.net.platform import Platform
from psync.numerics.memory import BlockPool
from psync.store.store import ShardStore
from psync.wire.codec import Message

# Of any task, and of a link to one.


def endpoint_of(owner: Any) -> Endpoint:
    return owner._endpoint


def platform_of(task: Any) -> Platform:
    return getattr(task, "platform", None) or task._platform


def handlers_of(task: Any) -> dict[type[Message], Handler]:
    """Who serves which message; a test may put others in their places."""
    return endpoint_of(task).handlers


def peers_of(link: PsLink) -> list[Connection]:
    """The connections of a link to a ps, one a lane."""
    return list(link._peers.values())


def pool_of(owner: Any) -> BlockPool:
    return getattr(owner, "pool", None) or owner._pool


# Of a ps task.


def store_of(ps: Any) -> ShardStore:
    return ps.services.store


def host_of(ps: Any) -> BackupHost:
    """The backups of other ps tasks in its process."""
    return ps._host


def backups_of(ps: Any) -> dict[int, Any]:
    """The same, by the index of the other ps."""
    return host_of(ps)._backups


def backup_of(ps: Any, index: int) -> Any:
    """The task that is the backup of another ps, in the process of this one."""
    return backups_of(ps)[index].task


async def settled(ps: Any) -> None:
    """Wait until backups have done all that their logs say."""
    await asyncio.gather(*(each.settle() for each in backups_of(ps).values()))


# Of the others.


def session_of(worker: Any) -> Any:
    """What a worker has for the coordinator that it serves; None without one."""
    return worker._session


def iterators_of(worker: Any) -> list[Any]:
    """The iterators of datasets that it holds."""
    return list(session_of(worker).iterators.values())
