"""What a ps sends its backup, in place of a connection: the test says when entries are taken."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from asked import peer_of, served
from inside import backups_of, handlers_of
from psync.errors import FencedError, PsyncError
from psync.net.platform import Platform
from psync.ps.executor import Entry
from psync.store.commit_log import CommitLog, LogState
from psync.wire.codec import Message, decode, encode
from psync.wire.messages import (
    BackUp,
    BeginBackup,
    DefinePlan,
    FillSnapshot,
    LogEntries,
    Text,
)
from stage_words import entry_words, error_words

if TYPE_CHECKING:
    from stage import Stage

MANY = 1 << 30


class HeldSender:
    """In place of a ``BackupSender``: the test says when the backup takes entries."""

    stage: Stage

    def __init__(
        self,
        platform: Platform,
        begin: BeginBackup,
        order: BackUp,
        log: CommitLog[Entry],
        begun: Callable[[str, str], bool],
        advanced: Callable[[], None],
        deposed: Callable[[], None],
    ) -> None:
        self.order, self.log = order, log
        self.ended = asyncio.Event()
        self.hidden = 0  # definitions, of which there are many
        self.error: PsyncError | None = None
        self._begin, self._begun, self._advanced = begin, begun, advanced
        self._deposed = deposed
        self._peer = peer_of((f"/job:ps/task:{begin.ps}", begin.coordinator))
        self._host = self.stage.host(begin.ps)
        self.stage.senders[log] = self

    async def _tell(self, message: Message, body: Sequence[Any] = ()) -> Message:
        segments = [memoryview(bytes(each)) for each in body]
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        handler = handlers_of(self._host)[type(message)]
        served(handler, self._peer, decode(encode(message)), segments, future.set_result)
        outcome = await future
        if isinstance(outcome, Exception):
            raise outcome
        return cast(Message, outcome.message)

    async def copy(self, frozen: Any, first: int, before: Sequence[Entry] = ()) -> None:
        ps, order = self._begin.ps, self.order
        begin = replace(self._begin, first=first - len(before), before=len(before))
        begun = await self._tell(begin, [frozen.state.to_bytes()])
        assert isinstance(begun, Text)
        self.is_unlike = self._begun(order.task, begun.value)
        self.stage.say(f"ps {ps} → its backup: a snapshot")
        known = backups_of(self._host)[ps]
        known._done = functools.partial(self._executed, first, known._done)
        for item, data in items_of(frozen):
            await self._tell(FillSnapshot(ps, order.epoch, item, 0), [data])
        frozen.drop()
        for number, entry in enumerate(before, first - len(before)):
            message = decode(entry.header)
            if isinstance(message, DefinePlan):
                self.hidden += 1
            else:
                words = entry_words(entry.client, message)
                self.stage.say(f"ps {ps} → its backup: {words}")
            await self._entries(number, [entry])
        await self.stage.copied()
        self.log.pair()
        while self.log.taken < self.log.last:
            await self.take(MANY)

    def _executed(self, first: int, plain: Any, number: int, nbytes: int, outcome: Any) -> None:
        if number >= first:  # else it came with the snapshot
            self.stage.executed(self._begin.ps, number, outcome)
        plain(number, nbytes, outcome)

    async def _entries(self, first: int, entries: Sequence[Entry]) -> int:
        listed = [(*each.client, each.header, len(each.body)) for each in entries]
        segments = [segment for each in entries for segment in each.body]
        message = LogEntries(self._begin.ps, self.order.epoch, first, listed)
        await self._tell(message, segments)
        return first + len(entries) - 1

    async def take(self, count: int, *, heard: bool = True) -> int:
        """Let the backup have the next entries; return how many.

        Args:
            count: At most so many.
            heard: Whether its primary hears that it has them.
        """
        first, batch = self.log.shipped, list[Entry]()
        if self.log.state is LogState.PAIRED:
            first, batch = self.log.to_ship(count, MANY)
        if not batch:  # or its snapshot is on its way
            return 0
        try:
            upto = await self._entries(first, batch)
        except PsyncError as exc:
            self._fail(exc)
            return 0
        numbers = " to ".join(dict.fromkeys([f"{first}", f"{upto}"]))
        what = "entry" if len(batch) == 1 else "entries"
        not_heard = "" if heard else ", which is not heard"
        self.stage.say(f"backup of ps {self._begin.ps}: has {what} {numbers}{not_heard}")
        if heard:
            self.log.note_taken(upto)
            self._advanced()
        return len(batch)

    def ship_soon(self) -> None:
        """Nothing: see ``take``."""

    def _fail(self, error: PsyncError) -> None:
        if not self.ended.is_set():
            self.error = error
            self.ended.set()
            self.stage.say(f"the backup does not follow, {error_words(error)}")
            if isinstance(error, FencedError):
                self._deposed()

    def close(self) -> Any:
        self.ended.set()
        self.stage.senders.pop(self.log, None)
        return _nothing()


async def _nothing() -> None: ...


def items_of(frozen: Any) -> Iterator[tuple[int, bytes]]:
    """Yield the items of what a ps holds still, and their bytes."""
    for item, known in enumerate(frozen.state.items):
        if not known.is_constant:
            yield item, b"".join(map(bytes, frozen.part(item, 0, known.nbytes)))
