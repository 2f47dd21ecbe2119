"""On a ps: what it held for an earlier program is kept, described, and adopted by the next one.

AttachPs(keep=True)   nobody of the earlier program is served any more; updates and steps that
                      have begun are carried to their end; then what there is is set aside
DescribeShards        what is set aside
AdoptShards           moves it to the present program's store, or drops it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from psync.errors import FencedError
from psync.net.peer import Handler, Peer, Reply
from psync.ps.cooperative_work import LongWork
from psync.store.previous_store import FormerStore
from psync.store.reattach import Orders
from psync.store.store import ShardStore
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.recovery_messages import AdoptShards, DescribeShards, ShardsDescribed


class AdoptionService:
    """What one ps keeps of earlier programs.

    Args:
        task: Name of the ps.
        work: What has begun and takes long.
        check_coordinator: Raises unless a peer is the coordinator that this ps serves.
        store: Returns the store of the present program.
    """

    def __init__(
        self,
        task: str,
        work: LongWork,
        check_coordinator: Callable[[Peer], None],
        store: Callable[[], ShardStore],
    ) -> None:
        self._task = task
        self._former = FormerStore(task)
        self._work = work
        self._check_coordinator = check_coordinator
        self._store = store
        self._settling: asyncio.Task[None] | None = None  # what has begun is carried to its end

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            DescribeShards: Handler(self._describe),
            AdoptShards: Handler(self._adopt),
        }

    def begin(self, store: ShardStore, previous: int, coordinator: int, *, keep: bool) -> None:
        """A newer coordinator is served, with a store of its own.

        Args:
            store: That of the earlier one.
            previous: Incarnation of the earlier one; 0: there was none.
            coordinator: Of the newer one.
            keep: Whether the store is set aside; else it is dropped, with all that was.
        """
        before, self._settling = self._settling, None
        if not keep:
            if before is not None:
                before.cancel()
            self._former.drop()
            self._former.life = coordinator
        else:
            settle = self._settle(before, store, previous)
            self._settling = asyncio.get_running_loop().create_task(settle)

    async def settled(self) -> Reply:
        """Answer AttachPs once what has begun before is at its end.

        Raises:
            FencedError: A coordinator has come meanwhile for whom nothing is kept.

        Cancellation: Safe.
        """
        settling = self._settling
        if settling is not None:
            await asyncio.wait((settling,))
            if settling.cancelled():
                raise FencedError(f"{self._task} serves a newer coordinator")
            settling.result()
        return Reply(Done())

    @property
    def life(self) -> int:
        """Of what is held here, see ``adoption``; 0: it has none."""
        return self._former.life

    def copied(self, life: int) -> None:
        """What is held here from now on is a copy of something of this life."""
        self._former.life = life

    def lost(self) -> None:
        """Nobody may go on with what is held here, unless the present program says that it may.

        Another process serves it, or this is an image that others may not have taken yet, or a
        synchronous step is applied here and not everywhere.
        """
        self._former.drop()
        self._former.life = 0

    async def close(self) -> None:
        """Wait for nothing more. Cancellation: safe."""
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait((self._settling,))

    async def _settle(
        self,
        before: asyncio.Task[None] | None,
        store: ShardStore,
        previous: int,
    ) -> None:
        if before is not None:
            await asyncio.wait((before,))
        await self._work.drain()
        self._former.take(store, previous)

    def _describe(self, peer: Peer, message: DescribeShards, _: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        return Reply(ShardsDescribed(), [self._former.describe().to_bytes()])

    def _adopt(self, peer: Peer, message: AdoptShards, body: list[memoryview]) -> Reply:
        self._check_coordinator(peer)
        self._former.adopt(Orders.from_bytes(b"".join(body)), self._store())
        if message.last:
            self._former.drop()
        if message.life:
            self._former.life = message.life
        return Reply(Done())
