"""Cooperative work on a ps: large updates in pieces, and the requests that wait for a busy shard.

A large update is done block by block, with the loop running in between. Its shard is busy
meanwhile; requests for it wait until some update has ended, and look again. An update that fails
half-way has torn its shard: then the task must end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from psync.errors import BusyError, PsyncError
from psync.store.store import Key, ShardStore, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_BYTES = 2 << 20
"""What is applied in one turn of the loop: a millisecond of Adam, a fifth of one of SGD."""

SHARD_BYTES = 16 << 10
"""What a shard costs beyond its bytes, expressed in bytes."""

PIECE_S = 0.0
"""Pause between two pieces, in seconds: the loop runs once. The simulator has slow ones."""


class Changing:
    """Something that changes; requests wait for that, and look again.

    Attributes:
        waiting: Of these requests.
    """

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    async def changed(self) -> None:
        """Wait until something has changed. Cancellation: safe."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        await turn

    def wake(self) -> None:
        """Something has changed."""
        waiting, self.waiting = self.waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)


class LongWork(Changing):
    """Updates under way on one ps, whatever they belong to.

    Args:
        task: Name of the ps, for messages.
        torn: Called when an update has failed half-way.
    """

    def __init__(self, task: str, torn: Callable[[], None]) -> None:
        super().__init__()
        self.is_torn = False  # an update failed half-way
        self._task = task
        self._on_torn = torn
        self._updates: set[asyncio.Task[Any]] = set()  # never cancelled

    def to_the_end(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Carry work out whatever becomes of its request: half an update is none."""
        task = asyncio.get_running_loop().create_task(work)
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        return asyncio.shield(task)

    async def drain(self) -> None:
        """Wait until all that has begun is done. Cancellation: safe; it goes on.

        That includes what is begun meanwhile: the end of a compute begins the next of its shards.
        """
        while self._updates:
            await asyncio.wait(list(self._updates))

    def fits_now(self, store: ShardStore, keys: Sequence[Key | str], nbytes: int) -> bool:
        """Return whether shards are idle, and an update small enough for one turn.

        Names of accumulators are not looked up: nothing but computes works on these.
        """
        if nbytes + SHARD_BYTES * len(keys) > INLINE_BYTES:
            return False
        for key in keys:
            if not isinstance(key, str) and store.busy(key):
                return False
        return True

    async def when_idle(self, function: Callable[..., T], *arguments: Any) -> T:
        """Read shards or begin work on them when all that it needs are idle.

        Args:
            function: Does it, or raises BusyError.
            arguments: For ``function``.

        Raises:
            PsyncError: The task is about to end; or what else ``function`` raises.

        Cancellation: Safe.
        """
        while True:
            try:
                return function(*arguments)
            except BusyError:
                await self.next_turn()

    async def shard_by_shard(self, costs: Sequence[int], begin: Callable[[int], Work]) -> None:
        """Update shards one after the other, small ones several in a turn of the loop.

        Args:
            costs: Bytes that the update of each one touches.
            begin: Starts the work on one, by its position; who is busy is waited for.
        """
        at_once = 0  # cost in bytes since the loop last ran
        for position, cost in enumerate(costs):
            work = await self.when_idle(begin, position)
            at_once += cost + SHARD_BYTES
            if at_once <= INLINE_BYTES:
                self.finish_now(work)
            else:
                await self.finish(work)
                at_once = 0

    def finish_now(self, work: Work) -> None:
        """Do the work on one shard."""
        try:
            for _ in work:
                pass
        except Exception as exc:
            self.give_up(exc)
            raise

    async def finish(self, work: Work) -> None:
        """Do the work on one shard, with the loop running between blocks."""
        try:
            for _ in work:
                await asyncio.sleep(PIECE_S)
        except Exception as exc:
            self.give_up(exc)
            raise
        finally:
            work.close()  # cancelled: the rest at once
            self.wake()
        await asyncio.sleep(0)  # readers first: a queue of updates must not starve them

    def give_up(self, error: Exception) -> None:
        """A block could not be written, so its shard is torn: the task must end."""
        logger.critical("%s: an update failed half-way, the task ends", self._task, exc_info=error)
        self.is_torn = True
        self._on_torn()
        self.wake()

    async def next_turn(self) -> None:
        """Wait until some update has ended.

        Raises:
            PsyncError: The task is about to end.

        Cancellation: Safe.
        """
        if not self.is_torn:
            await self.changed()
        self.check_whole()

    def check_whole(self) -> None:
        """Raise PsyncError if the task is about to end."""
        if self.is_torn:
            raise PsyncError(f"{self._task} ends: an update failed half-way")
