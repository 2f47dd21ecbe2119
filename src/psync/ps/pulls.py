"""Pulls of whole shards on a ps, under a lock or without one.

One object serves one coordinator, with its store; a newer one gets another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from psync.errors import BusyError
from psync.net.peer import Handler, Peer, Reply
from psync.ps.cooperative_work import LongWork
from psync.ps.locks import PsLocks
from psync.ps.update import set_of
from psync.store.store import Key, ShardStore
from psync.sync.ps_sync import PsSync
from psync.wire.codec import Message
from psync.wire.lock_messages import PullLocked
from psync.wire.ps_messages import Pull, Pulled


class PsPulls:
    """Serves pulls.

    Args:
        task: Name of the ps.
        store: Its shards.
        work: What takes long.
        sync: Knows which steps the values are of.
        locks: Knows who holds which.
    """

    def __init__(
        self, task: str, store: ShardStore, work: LongWork, sync: PsSync, locks: PsLocks
    ) -> None:
        self.pulls = 0  # that were served
        self._task = task
        self._store = store
        self._work = work
        self._sync = sync
        self._locks = locks

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {Pull: Handler(self._pull), PullLocked: Handler(self._pull_locked)}

    def _pull(self, peer: Peer, message: Pull, _: list[memoryview]) -> Reply | Awaitable[Reply]:
        keys = set_of(peer, message, self._task).keys
        read = self._reader(message)
        self.pulls += 1
        try:
            return Reply(Pulled(self._sync.steps()), [read(key) for key in keys])
        except BusyError:
            return self._pull_later(keys, read)

    def _pull_locked(
        self, peer: Peer, message: PullLocked, body: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        keys = set_of(peer, message, self._task).keys
        self._locks.check((peer.task, peer.incarnation), message, keys)
        return self._pull(peer, message, body)

    def _reader(self, message: Pull) -> Callable[[Key], list[memoryview]]:
        store = self._store
        if message.optimizer < 0:
            return store.read
        return lambda key: store.read_slot(key, message.optimizer, message.slot)

    async def _pull_later(
        self, keys: Sequence[Key], read: Callable[[Key], list[memoryview]]
    ) -> Reply:
        """Read shard by shard: under steady updates never all of them are idle at once."""
        steps = self._sync.steps()
        return Reply(Pulled(steps), [await self._work.when_idle(read, key) for key in keys])
