"""Supervision of a coordinator's connections: its incarnation, and the coroutines that keep them.

One coroutine per task: connect, attach, wait for the end, again; see ``ps_links`` and
``worker_links``. The error of one is that of all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from psync.chief.enquiry import enquire
from psync.chief.events import Events
from psync.errors import ConnectionLost, FencedError, PsyncError
from psync.net.endpoint import Endpoint
from psync.net.environment import note_incarnation

logger = logging.getLogger(__name__)


class Supervision:
    """The supervisors of one coordinator.

    Args:
        endpoint: Bears the incarnation.
        processes: Address of each ps at first, by name; that of ps 0 grants incarnations.
        events: Where it is noted that tasks come and go.

    Attributes:
        on_replaced: Called when a newer coordinator has taken the cluster over.
        is_up: Whether the cluster came up.
        failure: Why it cannot come up.
        changed: Set when a task was attached, or a supervisor failed.
        enquiring: Locked while another incarnation is asked for.
        is_closing: Whether connections end because they are closed here.
    """

    def __init__(self, endpoint: Endpoint, processes: Mapping[str, str], events: Events) -> None:
        self.endpoint = endpoint
        self.note = events.note
        self.on_replaced: Callable[[FencedError], None] = lambda _: None
        self.is_up = False
        self.failure: BaseException | None = None
        self.changed = asyncio.Event()
        self.is_closing = False
        self._ps_0 = next(iter(processes.items()))
        self.enquiring = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def supervise(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a supervisor until ``close``."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            self.changed.set()
            if self.is_up and isinstance(error, FencedError):
                self.on_replaced(error)
            elif not isinstance(error, PsyncError):
                logger.error("a supervisor of the coordinator failed", exc_info=error)

    async def enquire(self, previous: int = 0, seen: int = 0) -> None:
        """Let ps 0 grant an incarnation, see ``enquiry.enquire``; it is borne from now on."""
        incarnation = await enquire(
            self.endpoint.platform, *self._ps_0, previous=previous, seen=seen
        )
        note_incarnation(incarnation)
        self.endpoint.incarnation = incarnation

    async def ask_again(self, refused: int, task: str, address: str) -> None:
        """A task has served a higher incarnation than ``refused``: ask ps 0 for one above that.

        So it is where ps 0 was started anew on a machine whose clock is behind. All tasks are
        attached again.

        Raises:
            FencedError: It is not so: a newer coordinator has come.
        """
        try:
            async with self.enquiring:
                if self.endpoint.incarnation != refused:
                    return  # somebody has asked meanwhile
                seen = await enquire(self.endpoint.platform, task, address)
                if seen <= refused:
                    raise FencedError(f"{task} serves a newer coordinator than this one")
                logger.warning("%s has seen a newer coordinator than ps 0 has granted", task)
                await self.enquire(refused, seen)
                for peer in self.endpoint.peers:
                    peer.abort(ConnectionLost("this coordinator has a new incarnation"))
        finally:
            self.changed.set()

    async def close(self) -> None:
        """End all supervisors. Cancellation: some may still end."""
        self.is_closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
