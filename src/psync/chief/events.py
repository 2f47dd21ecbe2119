"""Events of a cluster, in order: rollbacks and failovers for its program, and notes for people."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from psync.errors import other_loop

KEPT_NOTES = 100
"""The newest are kept: what a status shows as recent."""


@dataclass(frozen=True, slots=True)
class RollbackEvent:
    """A ps was lost, and all ps tasks returned to a checkpoint.

    Attributes:
        lost: Names of the ps tasks whose contents were lost.
        timeline: Number of the timeline that began with it, from 1.
        from_step: Number of updates of the most used optimizer before the loss, as far as the
            remaining ps tasks knew; ``to_step`` if none remained.
        to_step: Number of its updates in the checkpoint.
        closures: Ids (``RemoteValue.closure_id``), ascending, of closures that had succeeded and
            some of whose updates are not in the checkpoint. They run again only if the program
            calls ``coordinator.reschedule(event)``. Not included are data shards of
            ``distribute_once``, which are pending again, and closures that had not ended: these run
            again, and their updates count once.
        seconds: Seconds from noticing the loss until training continued.
        updates: Number of undone updates of these closures (pushes, assigns, metrics). Updates of
            the program itself since the checkpoint are undone as well, and not counted.
    """

    lost: tuple[str, ...]
    timeline: int
    from_step: int
    to_step: int
    closures: tuple[int, ...]
    seconds: float
    updates: int = 0

    def __str__(self) -> str:
        """Say what was lost, for people."""
        began = f"from step {self.from_step} " if self.from_step > self.to_step else ""
        return (
            f"{', '.join(self.lost)} lost: {began}back to step {self.to_step}; undone: "
            f"{_count(self.updates, 'update')} of {_count(len(self.closures), 'closure')}"
        )


@dataclass(frozen=True, slots=True)
class FailoverEvent:
    """Ps tasks were lost, and their backups serve in their place. Nothing is undone.

    Attributes:
        lost: Names of the lost ps tasks.
        served_by: Names of the tasks in whose processes they are served now, one for each.
        seconds: Seconds from noticing the loss until training continued.
    """

    lost: tuple[str, ...]
    served_by: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """Say what was lost, for people."""
        return f"{', '.join(self.lost)} lost: served by {', '.join(self.served_by)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


Event = RollbackEvent | FailoverEvent


class Note(NamedTuple):
    """Something that happened to a task, for people who look at the cluster."""

    at: float  # loop time
    kind: str  # "joined", "lost", "left", "error", "rollback", …: one word, or two
    text: str


class Events:
    """The events of one coordinator, all of which are kept: there are few.

    Attributes:
        notes: The newest notes, oldest first.
    """

    def __init__(self) -> None:
        self.notes: deque[Note] = deque(maxlen=KEPT_NOTES)
        self._events: list[Event] = []
        self._news = asyncio.Event()  # another one for each event
        self._closed = False
        self._loop = asyncio._get_running_loop()  # None: only in tests of rules

    def emit(self, event: Event) -> None:
        """Note an event, and tell whoever waits for the next one."""
        self._events.append(event)
        self.note("rollback" if isinstance(event, RollbackEvent) else "failover", str(event))
        self._wake()

    @property
    def rollbacks(self) -> list[RollbackEvent]:
        """The rollbacks so far, in order."""
        return [event for event in self._events if isinstance(event, RollbackEvent)]

    def note(self, kind: str, text: str) -> None:
        """Note something that is shown to people, and told to no program."""
        self.notes.append(Note(asyncio.get_running_loop().time(), kind, text))

    def close(self) -> None:
        """There are no further ones: streams end after the last."""
        self._closed = True
        self._wake()

    async def stream(self) -> AsyncIterator[Event]:
        """Yield every event, from the first on, until the coordinator is closed."""
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise other_loop("events")
        at = 0
        while True:
            while at < len(self._events):
                at += 1
                yield self._events[at - 1]
            if self._closed:
                return
            await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
