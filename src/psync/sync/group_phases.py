"""The phases of synchronous groups on ps 0, and which event leads from one to another.

    NEW        nobody has pushed yet, or the first step could not be read: the next push tries
    READING    the first step is read, which is the global step; pushes wait for it
    REPLAYING  this ps 0 was a backup: the last step of its primary is closed once more; pushes wait
    OPEN       pushes are counted
    HELD       a step is decided while closing is paused
    CLOSING    a step is on its way to every ps

A group has one step at most that is decided and not applied; its pushes are counted for the next.
Closing is paused for all groups at once: for a cut, for a copy to a backup, at the end.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine
from enum import Enum
from typing import Any

from psync.errors import LocalProtocolError, PsyncError
from psync.sync.group import Close

logger = logging.getLogger(__name__)


class Phase(Enum):
    """How far a group is."""

    NEW = "new"
    READING = "reading its first step"
    REPLAYING = "closing the last step of its primary"
    OPEN = "open"
    HELD = "held by a pause"
    CLOSING = "closing a step"

    __hash__ = object.__hash__  # Enum's own is written in Python: 100 ns in every move


class GroupEvent(Enum):
    """What happens to a group."""

    READ = "read its first step"
    REPLAY = "close the last step of its primary"
    DEFINE = "be defined"
    FAIL = "fail to be defined"
    HOLD = "be held"
    RESUME = "be resumed"
    CLOSE = "close a step"
    END = "end a step"

    __hash__ = object.__hash__


MOVES: dict[Phase, dict[GroupEvent, Phase]] = {
    Phase.NEW: {GroupEvent.READ: Phase.READING, GroupEvent.REPLAY: Phase.REPLAYING},
    Phase.READING: {GroupEvent.DEFINE: Phase.OPEN, GroupEvent.FAIL: Phase.NEW},
    Phase.REPLAYING: {GroupEvent.DEFINE: Phase.OPEN, GroupEvent.FAIL: Phase.NEW},
    Phase.OPEN: {GroupEvent.HOLD: Phase.HELD, GroupEvent.CLOSE: Phase.CLOSING},
    Phase.HELD: {GroupEvent.RESUME: Phase.OPEN},
    Phase.CLOSING: {GroupEvent.END: Phase.OPEN},
}


class GroupPhases:
    """The phases of all groups of one coordinator and timeline, and what is under way of them."""

    def __init__(self) -> None:
        self._phases: dict[int, Phase] = {}  # of those that are not new
        self._under_way: dict[int, asyncio.Future[None]] = {}  # of groups that begin, or close
        self._others: set[asyncio.Task[None]] = set()  # under way, and of no group
        self._pauses: set[str] = set()  # for what no step is closed
        self._held: dict[int, Close] = {}  # by group: decided meanwhile
        self._resumed = asyncio.Event()

    def __getitem__(self, group: int) -> Phase:
        """Return the phase of a group."""
        return self._phases.get(group, Phase.NEW)

    def of(self, *phases: Phase) -> list[int]:
        """Return the groups that are in one of these phases."""
        return [group for group, phase in self._phases.items() if phase in phases]

    def move(self, group: int, event: GroupEvent) -> None:
        """Note what happens to a group.

        Raises:
            LocalProtocolError: That cannot happen in its phase.
        """
        phase = self[group]
        try:
            self._phases[group] = MOVES[phase][event]
        except KeyError:
            raise LocalProtocolError(
                f"synchronous group {group} cannot {event.value}: it is {phase.value}"
            ) from None

    # Beginning.

    def begin(
        self, group: int, event: GroupEvent, beginning: Coroutine[Any, Any, None]
    ) -> asyncio.Future[None]:
        """Begin a group with READ or REPLAY, whoever waits for it; it is to be defined then."""
        self.move(group, event)
        task = self._under_way[group] = asyncio.get_running_loop().create_task(beginning)
        task.add_done_callback(functools.partial(self._begun, group))
        return task

    def beginning(self, group: int) -> asyncio.Future[None] | None:
        """Return the end of what a group that is not defined begins with; None: it is new."""
        return self._under_way.get(group)

    def _begun(self, group: int, task: asyncio.Task[None]) -> None:
        if self._under_way.get(group) is task:  # else it closes a step already
            del self._under_way[group]
            if self[group] in (Phase.READING, Phase.REPLAYING):
                self.move(group, GroupEvent.FAIL)
        # It is seen, even if those who asked have gone.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, PsyncError):
            logger.error("synchronous group %d cannot begin", group, exc_info=error)

    # Closing.

    def hold(self, close: Close) -> bool:
        """Hold a step until closing is resumed; False: it is not paused."""
        if self._pauses:
            self.move(close.group, GroupEvent.HOLD)
            self._held[close.group] = close
        return bool(self._pauses)

    def close(self, group: int) -> None:
        """A step is closed from now on, until ``ended``."""
        self.move(group, GroupEvent.CLOSE)
        self._under_way[group] = asyncio.get_running_loop().create_future()

    def ended(self, group: int) -> None:
        """It is applied everywhere, or cannot be."""
        self.move(group, GroupEvent.END)
        self._under_way.pop(group).set_result(None)

    def carry(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin what concerns all ps tasks, and no group: a pause waits for it, too."""
        task = asyncio.get_running_loop().create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def carried(self) -> list[asyncio.Future[None]]:
        """Return what is to be waited for until the other ps tasks are told nothing more."""
        groups = self.of(Phase.REPLAYING, Phase.CLOSING)
        return [*(self._under_way[group] for group in groups), *self._others]

    # Pausing.

    async def pause(self, why: str) -> None:
        """Let no step be closed from now on, and wait for that which is being closed.

        Cancellation: Safe; it is paused.
        """
        self._pauses.add(why)
        self._resumed.clear()
        while carried := self.carried():
            await asyncio.wait(carried)

    def resume(self, why: str) -> list[Close]:
        """End a pause; return the steps that were held, if it was the last."""
        self._pauses.discard(why)
        if self._pauses:
            return []
        held, self._held = self._held, {}
        for group in held:
            self.move(group, GroupEvent.RESUME)
        self._resumed.set()
        return list(held.values())

    async def settled(self) -> bool:
        """Wait until a pause, or else what is under way, has ended; False: there was nothing."""
        if self._pauses:
            await self._resumed.wait()
        elif carried := self.carried():
            await asyncio.wait(carried)
        else:
            return False
        return True

    async def drain(self) -> None:
        """Wait for what is under way."""
        if under_way := [*self._under_way.values(), *self._others]:
            await asyncio.wait(under_way)

    def drop(self) -> None:
        """Forget all steps that are held, for good."""
        self._pauses.clear()
        self._held.clear()
        self._resumed.set()
