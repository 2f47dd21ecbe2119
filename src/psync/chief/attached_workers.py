"""The workers that take part: over which connections they are reached, and who is about to leave.

``WorkerLinks`` says who comes and goes; the coordinator and what belongs to it speak to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from psync.cluster import parse_task_name
from psync.errors import TransportError, UsageError
from psync.net.peer import Peer
from psync.wire.codec import Message
from psync.wire.frames import Segment


class AttachedWorkers:
    """The workers of one coordinator that take part, by name. Its length is their number."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[Peer, Peer]] = {}  # control and bulk, of each worker
        self._leaving: set[str] = set()  # of these, who is about to leave

    def __len__(self) -> int:
        return len(self._peers)

    def joined(self, worker: str, control: Peer, bulk: Peer) -> None:
        """A worker takes part from now on."""
        self._peers[worker] = (control, bulk)

    def leaves(self, worker: str) -> None:
        """A worker that takes part begins nothing new."""
        self._leaving.add(worker)

    def gone(self, worker: str) -> None:
        """A worker does not take part any more."""
        del self._peers[worker]
        self._leaving.discard(worker)

    def is_current(self, peer: Peer) -> bool:
        """Return whether this is a connection of a worker that was not given up."""
        return peer in self._peers.get(peer.task, ())

    def ready(self) -> list[str]:
        """Return the workers that are ready for closures, by index."""
        ready = self._peers.keys() - self._leaving
        return sorted(ready, key=lambda worker: parse_task_name(worker)[1])

    def notify(self, worker: str, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Notify one worker, which takes part."""
        self._peers[worker][0].notify(message, segments)

    def notify_all(self, message: Message) -> None:
        """Notify all workers."""
        for control, _ in self._peers.values():
            control.notify(message)

    async def ask_all(self, message: Message) -> dict[str, Message]:
        """Return what each worker that is there answers, by the worker's name.

        One that is lost meanwhile is left out. A worker answers when its step leaves the loop.

        Cancellation: Safe.
        """

        async def ask(control: Peer) -> Message | None:
            try:
                return (await control.call(message)).message
            except (TransportError, UsageError):  # lost, or no worker of ours any more
                return None

        asked = {worker: control for worker, (control, _) in self._peers.items()}
        answers = await asyncio.gather(*map(ask, asked.values()))
        pairs = zip(asked, answers, strict=True)
        return {worker: answer for worker, answer in pairs if answer is not None}
