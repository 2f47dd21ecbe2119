"""Cooperative work on a ps: large updates in pieces, and the requests that wait for a busy shard.

A large update is done block by block, with the loop running in between. Its shard is busy
meanwhile; requests for it wait until some update has ended, and look again. An update that fails
half-way has torn its shard: then the task must end.

Where a ps may use several cores, many blocks at a time are computed in a few threads instead, and
the loop serves others: numpy lets go of the interpreter while it computes. Threads see arrays and
nothing else (``store.work.Prepared``); all that is counted, shared or decided stays on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from psync.errors import BusyError, PsyncError
from psync.net.connection import Request
from psync.net.shielding import begin
from psync.store.store import Key, ShardStore, Work
from psync.store.work import Prepared, ShardWork, Workspace

logger = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_BYTES = 2 << 20
"""What is applied in one turn of the loop: a millisecond of Adam, a fifth of one of SGD."""

SHARD_BYTES = 16 << 10
"""What a shard costs beyond its bytes, expressed in bytes."""

PIECE_S = 0.0
"""Pause between two pieces, in seconds: the loop runs once. The simulator has slow ones."""

MAX_THREADS = 4
"""More of them wait for memory rather than for a core."""


def usable_cores() -> int:
    """Return how many cores this process may use. Cheap; it may be another number each time."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(eq=False)
class Changing:
    """Something that changes; requests wait for that, and look again.

    Attributes:
        waiting: Of these requests.
    """

    waiting: list[asyncio.Future[None]] = field(default_factory=list, init=False)

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


class _HandedOut:
    """Blocks on their way to a thread and back: computed once, by the thread or by the loop.

    Args:
        work: Whose they are.
        blocks: They.
    """

    def __init__(self, work: ShardWork, blocks: list[Prepared]) -> None:
        self.computed: asyncio.Future[None]  # by the thread, as the loop sees it
        self._work = work
        self._blocks = blocks
        self._lock = threading.Lock()
        self._is_begun = self._is_done = False

    def compute(self) -> None:
        """Compute the blocks, or wait for who does.

        Raises:
            RuntimeError: It failed, and who did it knows why.
        """
        with self._lock:
            if not self._is_begun:
                self._is_begun = True
                for block in self._blocks:
                    block.compute(_own.space)
                self._is_done = True
        if not self._is_done:
            raise RuntimeError("blocks of a shard could not be computed")

    def commit(self) -> None:
        """Give the blocks back to their work."""
        self._work.take_back(self._blocks)


class _Own(threading.local):
    """What each thread has."""

    def __init__(self) -> None:
        self.space = Workspace()


_own = _Own()


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
        self._threads: ThreadPoolExecutor | None = None  # until they are first used

    def to_the_end(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Carry work out whatever becomes of its request: half an update is none."""
        return asyncio.shield(begin(work, self._updates))

    async def drain(self) -> None:
        """Wait until all that has begun is done. Cancellation: safe; it goes on.

        That includes what is begun meanwhile: the end of a compute begins the next of its shards.
        """
        while self._updates:
            await asyncio.wait(list(self._updates))

    def close(self) -> None:
        """Let threads end; there is no work any more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    def fits_now(self, store: ShardStore, keys: Sequence[Key], nbytes: int) -> bool:
        """Return whether shards are idle, and an update small enough for one turn."""
        is_little = nbytes + SHARD_BYTES * len(keys) <= INLINE_BYTES
        return is_little and not any(map(store.busy, keys))

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

    def serve(
        self,
        request: Request[Any],
        store: ShardStore,
        keys: Sequence[Key],
        costs: Sequence[int],
        begin: Callable[[int], Work],
        answer: Callable[[], None],
    ) -> None:
        """Do for a request what changes no shard, and answer it: in this turn, if that is little.

        Args:
            request: Waits for that.
            store: Has the shards.
            keys: Of the shards.
            costs: As for ``shard_by_shard``.
            begin: Likewise.
            answer: Called at the end.
        """
        if not self.fits_now(store, keys, sum(costs)):
            request.start(self._serve_slowly(costs, begin, answer))
            return
        for position in range(len(costs)):
            for _ in begin(position):
                pass
        answer()

    async def _serve_slowly(
        self, costs: Sequence[int], begin: Callable[[int], Work], answer: Callable[[], None]
    ) -> None:
        await self.shard_by_shard(costs, begin)
        answer()

    def finish_now(self, work: Work) -> None:
        """Do the work on one shard."""
        try:
            for _ in work:
                pass
        except Exception as exc:
            self.give_up(exc)
            raise

    async def finish(self, work: Work) -> None:
        """Do the work on one shard, with the loop running between blocks, or while threads compute.

        Cancellation: The rest is done at once.
        """
        out: deque[_HandedOut] = deque()  # the oldest first
        try:
            try:
                await self._carry_out(work, out)
            except (asyncio.CancelledError, GeneratorExit):
                while out:
                    out[0].compute()
                    out.popleft().commit()
                work.close()
                raise
        except Exception as exc:
            for other in out:
                other.computed.cancel()
            if isinstance(work, ShardWork):
                work.fail()
            self.give_up(exc)
            raise
        finally:
            self.wake()
        await asyncio.sleep(0)  # readers first: a queue of updates must not starve them

    async def _carry_out(self, work: Work, out: deque[_HandedOut]) -> None:
        threads = min(MAX_THREADS, usable_cores())
        while True:
            most = 0  # that may be handed out when this goes on
            if threads > 1 and isinstance(work, ShardWork) and (blocks := work.hand_out(threads)):
                out.append(self._begin(_HandedOut(work, blocks)))
                most = threads  # and one that waits, so that no thread does
            if len(out) > most:
                await out[0].computed
                out.popleft().commit()
            elif not most:
                try:
                    next(work)
                except StopIteration:
                    return
                await asyncio.sleep(PIECE_S)

    def _begin(self, handed_out: _HandedOut) -> _HandedOut:
        """Let a thread compute blocks."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(MAX_THREADS, usable_cores()), "psync compute")
        loop = asyncio.get_running_loop()
        handed_out.computed = loop.run_in_executor(self._threads, handed_out.compute)
        return handed_out

    def give_up(self, error: Exception) -> None:
        """A block could not be written, so its shard is torn: the task must end."""
        logger.critical("%s: an update failed partway; the task ends", self._task, exc_info=error)
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
            raise PsyncError(f"{self._task} ends: an update failed partway")
