"""Global steps of synchronous groups, on the ps that holds them: raised once for each step.

ps 0 says which step is applied everywhere, and may say so again: over a new connection, or as the
backup that has taken its place. The number of the step tells whether it was raised for that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from psync.net.failpoints import Failpoints
from psync.net.peer import Handler, Peer, Reply
from psync.ps.committer import Committer
from psync.ps.cooperative_work import LongWork
from psync.ps.locks import PsLocks
from psync.specs import dtype_of
from psync.store.store import Key, ShardStore
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.sync_messages import RaiseStep

GLOBAL_STEP_DTYPE = "int64"

_ONE: np.ndarray = np.ones((), dtype_of(GLOBAL_STEP_DTYPE))


class GlobalSteps:
    """The global steps of one ps under one coordinator.

    Args:
        store: Its shards.
        check_closer: Raises unless a peer is the ps 0 that decides.
        work: Waits for shards that are busy.
        locks: Who must wait.
        failpoints: Of the ps.
    """

    def __init__(
        self,
        store: ShardStore,
        check_closer: Callable[[Peer], None],
        work: LongWork,
        locks: PsLocks,
        failpoints: Failpoints,
    ) -> None:
        self.committer: Committer | None = None  # None: there was never a backup
        self._raised: dict[int, int] = {}  # by group: the last step for which it was raised
        self._store = store
        self._check_closer = check_closer
        self._work = work
        self._locks = locks
        self._failpoints = failpoints

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {RaiseStep: Handler(self._raise_for)}

    def raised(self, group: int) -> int:
        """Return the last step of a group for which its global step was raised here, or -1."""
        return self._raised.get(group, -1)

    def note(self, group: int, step: int) -> None:
        """Take a global step for raised, as another ps has it whose backup this is."""
        if step >= 0:
            self._raised[group] = step

    def _raise_for(self, peer: Peer, message: RaiseStep, _: list[memoryview]) -> Awaitable[Reply]:
        self._check_closer(peer)
        return self._raise_and_answer((peer.task, peer.incarnation), message)

    async def _raise_and_answer(self, client: tuple[str, int], message: RaiseStep) -> Reply:
        await self.raise_one(client, message)
        self._failpoints.hit("ps.assign.applied")
        return Reply(Done())

    def raise_at_once(self, message: RaiseStep) -> bool:
        """Raise a global step now; False: nothing was done, since that takes longer."""
        key = (message.variable, message.index)
        if self.committer is not None or self._store.busy(key) or self._locks.blocks([key]):
            return False
        self._raise(key, message)
        return True

    async def raise_one(self, client: tuple[str, int], message: RaiseStep) -> None:
        """Raise a global step, in its turn.

        Cancellation: It may have been raised, or be raised later.
        """
        key = (message.variable, message.index)
        claim = self._locks.claim([key])
        try:
            await self._locks.turn(claim)
            if self.committer is None:
                await self._work.when_idle(self._raise, key, message)
            else:
                await self.committer.commit(
                    client, message, (), lambda: self._work.when_idle(self._raise, key, message)
                )
        finally:
            self._locks.end(claim)

    def _raise(self, key: Key, message: RaiseStep) -> None:
        if message.step <= self.raised(message.group):
            return
        operand = _ONE.reshape(self._store.spec(key).shape)
        checked = self._store.check_assign(key, "add", operand)
        self._work.finish_now(self._store.assign_checked(key, "add", checked))
        self._raised[message.group] = message.step
