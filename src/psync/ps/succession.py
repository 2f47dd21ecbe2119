"""In a ps process: which ps tasks it serves is told to the next coordinator, and the rest ends.

    AskServed   no backup of earlier coordinators is made, or begins to serve, from then on; one
                that is about to serve does so; then it is told what serves here, whose backups
                are here
    EndFormer   the rest of what earlier coordinators have left here ends

Only the task at the process's own address is asked: a backup that serves speaks for itself alone.

Source: docs/design.md, section 21.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from psync.errors import FencedError, UsageError
from psync.net.peer import Handler, Peer, Reply
from psync.ps.backup_host import ReplicaHost
from psync.store.locate_ps import Primary
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.recovery_messages import AskServed, EndFormer, ServedHere


class OwnTask(Protocol):
    """The ps at the process's own address."""

    @property
    def newest(self) -> int:
        """Incarnation of the newest coordinator that was heard of in this process."""

    def primary(self, address: str, epoch: int) -> Primary | None:
        """Return what a newer coordinator has to know of it; None: it serves nobody."""

    def end_below(self, coordinator: int) -> None:
        """Hold nothing, if a coordinator that is served is an earlier one."""


class ServedService:
    """What one process says of itself to the next coordinator.

    Args:
        task: Name of the ps whose process it is.
        own: The ps.
        host: The backups in this process.
    """

    def __init__(self, task: str, own: OwnTask, host: ReplicaHost) -> None:
        self._task = task
        self._own = own
        self._host = host

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {AskServed: Handler(self._ask), EndFormer: Handler(self._end)}

    async def _ask(self, peer: Peer, message: AskServed, _: list[memoryview]) -> Reply:
        self._check(peer)
        self._host.fence(peer.incarnation)
        primaries, copies = await self._host.found()
        own = self._own.primary("", 0)
        if own is not None:
            primaries.append(own)
        return Reply(ServedHere([dataclasses.astuple(each) for each in primaries], copies))

    def _end(self, peer: Peer, message: EndFormer, _: list[memoryview]) -> Reply:
        self._check(peer)
        self._host.end_below(peer.incarnation)
        self._own.end_below(peer.incarnation)
        return Reply(Done())

    def _check(self, peer: Peer) -> None:
        if not peer.task.startswith("/job:chief/"):
            raise UsageError(f"{peer.task} is not a coordinator")
        if peer.incarnation < self._own.newest:
            raise FencedError(f"{self._task} serves a newer coordinator than {peer.task}")
