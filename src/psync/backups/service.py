"""The primary's side of its backup: made, replaced or given up at the coordinator's command.

One object serves one coordinator and timeline, with its store; a newer one gets another. Before the
first ``BackUp`` nothing is queued, and nothing is slower.

    message         then
    BackUp          a snapshot is taken between two entries of the log, and sent while others go on;
                    answered when the backup has it, and all that was answered meanwhile
    BackUp, lost    answered when the backup no longer follows. No entry is applied until then, nor
                    until the coordinator has said that there is none: it might promote it
    BackUp to ""    goes on alone

Source: docs/design.md, "Failover".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from psync.backups.pairing import Computation, check_deterministic
from psync.backups.sender import BackupSender, Served
from psync.cluster import parse_task_name
from psync.errors import (
    BusyError,
    FencedError,
    ParameterServerLost,
    PsyncError,
    TransportError,
    UsageError,
)
from psync.net.connection import Connection, Handler, Request
from psync.net.platform import Platform
from psync.net.shielding import shielded
from psync.ps.cooperative_work import LongWork
from psync.ps.executor import Entry, Executor, Listed
from psync.store.commit_log import LogState
from psync.store.ledger import Client
from psync.store.snapshot import Frozen
from psync.store.store import ShardStore
from psync.store.sync_config import SyncConfig
from psync.wire.codec import Message, encode
from psync.wire.messages import BackUp, Done

logger = logging.getLogger(__name__)


class Section(Protocol):
    """A part of the state of a ps, which is its sections: entries are judged by them.

    To add one: a class with these three, in ``PsServices.sections``, which is what digests and
    backups are made of; its changes through ``Executor.submit``; the messages of ``entries`` in
    ``wire.messages``. A backup executes these when it has the snapshot, in the order of the
    sections; no two may replay the same message. ``ps.accumulators`` is a small one.

    Its own handlers are listed in ``PsServices.handlers``. If it remembers clients it is told who
    has been replaced (``PsServices.refuse_below``), if requests wait in it, when it ends (``end``).

    A newer coordinator that keeps the variables keeps the store alone, so it begins empty then.

    What checkpoints have of it besides: a field of ``SnapshotState`` (for older files with a
    default; with a check in ``from_bytes``) that ``PsServices.freeze`` fills in; a new
    ``PsServices`` begins with it.
    """

    def control(self) -> Any:
        """Return the state that judging has made, as plain data in an order of its own."""

    async def entries(self) -> list[Listed]:
        """Return entries that give a backup what no snapshot has; meanwhile nothing changes.

        Cancellation: Safe.
        """

    def replayed(self) -> dict[type[Message], Handler]:
        """Return who executes, on a backup, what only a log says, or says otherwise."""


class Steps(Protocol):
    """The synchronous steps of a ps."""

    async def pause(self, why: str) -> None:
        """Close no step from now on; wait for what is being closed."""

    def resume(self, why: str) -> None:
        """Go on."""

    def deterministic(self) -> Sequence[str]:
        """Return the names of those that are deterministic."""


class BackupService:
    """Keeps the backup of one ps.

    Args:
        platform: Network, secret.
        served: Says who is served, as of now; None: nobody.
        store: What is served.
        work: What takes long.
        check_coordinator: Raises unless a peer is the coordinator that is served.
        freeze: Holds what is served.
        executor: In whose order every change is made.
        begun: Told, once, that there is to be a backup.
        deposed: Told that another ps has taken this one's place.
        steps: What is there of synchronous steps.
        sections: Of the state.
        plans: Returns the definitions of all plans. These come and go as messages arrive, and not
            in the order of the log: those that entries name are there as it begins.
    """

    def __init__(
        self,
        platform: Platform,
        served: Callable[[], Served | None],
        store: ShardStore,
        work: LongWork,
        check_coordinator: Callable[[Connection], None],
        freeze: Callable[[], Frozen],
        executor: Executor,
        begun: Callable[[], None],
        deposed: Callable[[], None],
        steps: Steps,
        sections: Sequence[Section],
        plans: Callable[[], list[Listed]],
    ) -> None:
        self.executor = executor
        self._platform = platform
        self._served = served
        self._store = store
        self._work = work
        self._check_coordinator = check_coordinator
        self._freeze = freeze
        self._begun = begun
        self._deposed = deposed
        self._steps = steps
        self._sections = sections
        self._plans = plans
        self._epoch = 0
        self._sender: BackupSender | None = None
        self._unlike: BackUp | None = None  # the last one with another fingerprint
        self._unequal = 0  # how many there were
        self._copying: asyncio.Task[None] | None = None
        self._over = False

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {BackUp: Handler(self._back_up)}

    def statistics(self) -> dict[str, Any]:
        """Return counters."""
        log = self.executor.log
        return {
            "state": log.state.value, "epoch": self._epoch, "entries": log.last,
            "taken": log.taken, "waiting": self.executor.waiting, "unequal": self._unequal,
        }  # fmt: skip

    def waits_for(self) -> tuple[int, int]:
        """Return (process, epoch) of the backup without which nothing is done; (-1, 0): none.

        Without such a one it was certainly not replaced: the coordinator lets no backup serve
        before it has heard that it is complete, nor after it has said that there is none.
        """
        if self.executor.log.state is not LogState.PAIRED or self._sender is None:
            return -1, 0
        order = self._sender.order
        return parse_task_name(order.task)[1], order.epoch

    def describe(self) -> list[str]:
        """Say how it stands with the backup; for reports."""
        if not self._epoch:
            return []
        log = self.executor.log
        where = "" if self._sender is None else f" in the process of {self._sender.order.task}"
        return [
            f"backup{where}: {log.state.value}, has {log.taken} of {log.last} entries, "
            f"{self.executor.waiting} wait to be executed"
            + (", last bits may differ" if self._is_unlike else "")
        ]

    # Whether the backup computes the same bits.

    @property
    def _is_unlike(self) -> bool:
        return self._sender is not None and self._unlike is self._sender.order

    def _begun_with(self, order: BackUp, numerics: str) -> None:
        """Note the fingerprint of a backup, or refuse it; see ``pairing``."""
        if numerics == self._platform.parts.of(Computation)().numerics:
            return
        check_deterministic(self._store.task, order.task, self._steps.deterministic())
        self._unlike = order
        self._unequal += 1
        logger.warning(
            "%s and its backup in the process of %s do not compute bit-identical results: CPU, "
            "numpy or C library differ; after a failover, values may differ in their last bits",
            self._store.task, order.task,
        )  # fmt: skip

    def check_group(self, config: SyncConfig) -> None:
        """Refuse a new group that is deterministic, if the backup is not."""
        if config.deterministic and self._sender is not None and self._is_unlike:
            check_deterministic(self._store.task, self._sender.order.task, [config.name])

    # The coordinator's word.

    async def _back_up(self, request: Request[BackUp]) -> None:
        message = request.message
        self._check_coordinator(request.peer)
        if message.lost:
            await self._until_lost(message)
        else:
            self._order(message)
            await self._copied()
        request.answer(Done())

    def _order(self, message: BackUp) -> None:
        if message.epoch < self._epoch:
            raise UsageError(f"backup order {message.epoch} is older than {self._epoch}")
        if message.epoch == self._epoch:
            return  # it was asked before, over a connection that is lost
        served = self._served()
        if served is None:  # the backup of nothing would be no backup
            raise ParameterServerLost(self._store.task, "has been replaced by its backup")
        self._epoch = message.epoch
        self._drop()
        if not message.address:
            return
        executor = self.executor
        self._begun()
        self._sender = sender = self._platform.parts.of(BackupSender)(
            self._platform, served, message, executor.log, self._begun_with, executor.advance,
            self._depose,
        )  # fmt: skip
        executor.on_entry = sender.ship
        self._copying = asyncio.get_running_loop().create_task(self._copy(sender))
        self._copying.add_done_callback(_seen)

    async def _hold(self, sender: BackupSender, before: list[Listed], held: list[Frozen]) -> None:
        """Hold what the ps holds between two entries."""
        await self.executor.computes.settled()
        before += [each for section in self._sections for each in await section.entries()]
        while True:
            if self._sender is not sender:  # what it names would be taken for known to the next
                raise PsyncError("making the backup was cancelled")
            try:
                frozen = self._freeze()
            except BusyError:  # a shard is read or filled by what is no entry
                await self._work.next_turn()
            else:
                held.append(frozen)
                return

    async def _copy(self, sender: BackupSender) -> None:
        executor, began = self.executor, asyncio.get_running_loop().time()
        why = f"backup {sender.order.epoch}"
        try:
            try:
                # A step that is being closed is wholly in the snapshot, or in the log.
                await self._steps.pause(why)
                # Entries from now on are kept for the backup, though the snapshot may have to wait
                # for its turn; all before them are in it.
                first = executor.begin_copy() + 1
                before = self._plans()
                held: list[Frozen] = []
                await executor.turn(lambda: self._hold(sender, before, held))
            finally:
                self._steps.resume(why)
            (frozen,) = held
            await sender.copy(frozen, first, [_entry(*each) for each in before])
        except BaseException:
            if self._sender is sender and not self._over:
                executor.log.give_up()
                executor.advance()
            raise
        logger.info(
            "%s: its backup in the process of %s is complete, after %.2f s", self._store.task,
            sender.order.task, asyncio.get_running_loop().time() - began,
        )  # fmt: skip

    async def _copied(self) -> None:
        if self._copying is not None:
            try:
                await shielded(self._copying)
            except TransportError as exc:  # who asks would take it for a loss of his own
                raise PsyncError(f"its backup is not complete: {exc.message}") from exc

    async def _until_lost(self, message: BackUp) -> None:
        sender = self._sender
        if sender is not None and sender.order.epoch == message.epoch:
            await sender.ended.wait()
            if self._over:
                raise FencedError(f"{self._store.task} now serves other contents")

    def _depose(self) -> None:
        self._deposed()  # first: nobody is to hear of it from here
        self.executor.depose()

    def _drop(self) -> None:
        """Go on alone."""
        sender, self._sender = self._sender, None
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.cancel()
        if sender is not None:
            self._work.to_the_end(sender.close())
        self.executor.on_entry = lambda: None
        self.executor.log.give_up()
        self.executor.advance()

    def leave(self) -> None:
        """Execute the rest without the backup: none of this coordinator's is promoted any more."""
        self._over = True
        self._drop()

    def end(self, error: PsyncError | None = None) -> None:
        """Something else is served from now on, or nothing: whoever waits is told."""
        self._over = True
        self.executor.end(error)
        sender, self._sender = self._sender, None
        if self._copying is not None:
            self._copying.cancel()
        if sender is not None:
            self._work.to_the_end(sender.close())


def _entry(client: Client, message: Message | bytes, body: Sequence[memoryview]) -> Entry:
    header = message if isinstance(message, bytes) else encode(message)
    return Entry(client, header, body, sum(map(len, body)))


def _seen(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("a backup was not made: %s", error)
