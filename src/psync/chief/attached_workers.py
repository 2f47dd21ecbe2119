"""The workers of a coordinator, and those of them that take part: how these are reached.

``WorkerLinks`` keeps the records; the coordinator and what belongs to it speak to workers here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from psync.cluster import parse_task_name
from psync.errors import PsyncError, TransportError, UsageError
from psync.net.connection import Connection
from psync.wire.codec import Message
from psync.wire.frames import Segment
from psync.wire.messages import AskStatistics, Statistics


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker of the cluster, whether it is there or not. Its states:

    - away: ``peers`` is None, ``gone`` is set;
    - takes part: ``peers`` are its connections;
    - leaving (``leaving``): it begins nothing new, and is away next;
    - not kept (``is_kept`` is False): its supervisor ends with the next ``gone``.
    """

    name: str
    address: str
    place: int  # what steps call its index
    supervisor: asyncio.Task[None] | None = None
    is_kept: bool = True  # it is connected to again; False: it is not wanted any more
    joined: asyncio.Future[None] | None = None  # whoever added it waits for that
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set while it does not take part
    # For the status of the cluster:
    heard_at: float = 0.0  # loop time when it last said how closures had ended
    losses: int = 0  # how often it was lost
    missed: bool | None = None  # it was lost, or left; False: we have ended its session; None: new
    failed: int = 0  # closures that have raised on it
    last_error: tuple[float, str] | None = None  # loop time, and what the last of them has raised
    # Of its session:
    peers: tuple[Connection, Connection] | None = None  # control and bulk, while it takes part
    leaving: bool = False  # it has said that it leaves
    reason: str = ""  # what it gave as its reason for leaving, or for not going on
    sent_away: bool | None = None  # ended by us; True: what it runs is to blame

    def __post_init__(self) -> None:
        self.gone.set()

    def begin(self) -> None:
        """It is to take part: nothing is known of the end of this session."""
        self.leaving, self.reason, self.sent_away = False, "", None


class AttachedWorkers:
    """The workers of one coordinator that take part.

    Args:
        workers: All of the cluster, by name; changed by ``WorkerLinks``.
    """

    def __init__(self, workers: Mapping[str, WorkerRecord]) -> None:
        self._workers = workers

    def __len__(self) -> int:
        return len(self._controls())

    def _controls(self) -> dict[str, Connection]:
        """Return their control connections."""
        return {name: each.peers[0] for name, each in self._workers.items() if each.peers}

    def current(self, peer: Connection) -> WorkerRecord | None:
        """Return whose connection this is, unless that was given up."""
        worker = self._workers.get(peer.task)
        return worker if worker is not None and peer in (worker.peers or ()) else None

    def is_current(self, peer: Connection) -> bool:
        """Return whether this is a connection of a worker that was not given up."""
        return self.current(peer) is not None

    def heard(self, peer: Connection) -> bool:
        """Do as ``is_current``, and note that its worker has just said how closures ended."""
        worker = self.current(peer)
        if worker is None:
            return False
        worker.heard_at = asyncio.get_running_loop().time()
        return True

    def note_error(self, name: str, text: str) -> None:
        """Note that a closure has raised on a worker."""
        worker = self._workers[name]
        worker.failed += 1
        worker.last_error = asyncio.get_running_loop().time(), text

    def ready(self) -> list[str]:
        """Return the workers that are ready for closures, by index."""
        ready = [name for name in self._controls() if not self._workers[name].leaving]
        return sorted(ready, key=lambda name: parse_task_name(name)[1])

    def notify(self, worker: str, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Notify one worker, which takes part."""
        peers = self._workers[worker].peers
        assert peers is not None, "whoever notifies it was told when it went"
        peers[0].notify(message, segments)

    def notify_all(self, message: Message) -> None:
        """Notify all workers."""
        for control in self._controls().values():
            control.notify(message)

    async def waits(
        self, names: Collection[str], within_s: float
    ) -> dict[str, tuple[float, float]]:
        """Ask some of them how long they have waited for others; see ``watchdog.Waits``.

        Cancellation: Safe.
        """
        deadline = asyncio.get_running_loop().time() + within_s

        async def ask(control: Connection) -> dict[str, float]:
            try:
                message = (await control.call(AskStatistics(), deadline=deadline)).message
            except PsyncError:
                return {}
            assert isinstance(message, Statistics), "its only answer"
            work: dict[str, float] = message.counters["work"]
            return work

        asked = {name: peer for name, peer in self._controls().items() if name in names}
        answers = zip(asked, await asyncio.gather(*map(ask, asked.values())), strict=True)
        return {name: (work["since"], work["wait"]) for name, work in answers if work}

    async def ask_all(self, message: Message) -> dict[str, Message]:
        """Return what each worker that is there answers, by the worker's name.

        One that is lost meanwhile is left out. A worker answers when its step leaves the loop.

        Cancellation: Safe.
        """

        async def ask(control: Connection) -> Message | None:
            try:
                return (await control.call(message)).message
            except (TransportError, UsageError):  # lost, or no worker of ours any more
                return None

        asked = self._controls()
        answers = await asyncio.gather(*map(ask, asked.values()))
        pairs = zip(asked, answers, strict=True)
        return {worker: answer for worker, answer in pairs if answer is not None}
