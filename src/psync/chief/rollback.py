"""Rollback: a lost ps comes back, and all ps tasks restore the newest checkpoint.

    RUNNING   --a ps is lost-->                    WAITING
    WAITING   --every ps is there-->               LOADING    PrepareSnapshot, FillSnapshot
    LOADING   --every ps is ready-->               SWITCHING  RestoreSnapshot: a new timeline
    SWITCHING --every ps has it-->                 RUNNING    RollbackEvent, then AdoptShards
    WAITING, LOADING, SWITCHING --a ps is lost-->  WAITING
    any       --no checkpoint, or not in time-->   LOST       for ever

Everything else that talks to ps tasks is paused meanwhile, see ``PsLink.hold``. What was sent in
the old timeline is refused by fences: every worker bears a new incarnation afterwards.

Source: docs/design.md, "Rollback".
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from psync.checkpoints.files import disk_errors
from psync.checkpoints.stored_snapshots import StoredSnapshot
from psync.checkpoints.writer import streamed_by_environ
from psync.chief.cluster_links import ClusterLinks
from psync.chief.creation import Creation
from psync.chief.events import Events, RollbackEvent
from psync.chief.recovery_state import RecoveryState
from psync.client.calls import all_of
from psync.client.ps_link import PsLink, always
from psync.closures.queue import ClosureQueue
from psync.closures.rollback import CutCalls, EndedClosures
from psync.errors import (
    CheckpointCorrupt,
    CheckpointError,
    ConnectionLost,
    ParameterServerLost,
    PsyncError,
)
from psync.store.reattach import Orders
from psync.store.snapshot_state import SnapshotState
from psync.wire.codec import Message
from psync.wire.messages import AskStatistics, Statistics
from psync.wire.recovery_messages import AdoptShards, FillSnapshot, PrepareSnapshot, RestoreSnapshot

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Sent at once where a ps cannot read the file itself."""

UNSAVED = "no CheckpointManager has saved anything yet"

MAX_ATTEMPTS = 50
"""In a row: ps tasks that die again and again while they are being recovered."""


Source = Callable[[], Sequence[StoredSnapshot] | None]
"""Returns the snapshots of the newest checkpoint, one for each ps; None: there is none. Blocks."""


class PsRecovery:
    """Recovers the ps tasks of one coordinator.

    Args:
        state: Whether training runs.
        links: To all tasks.
        queue: Knows which closures have ended.
        creation: Knows what was created.
        events: Where a rollback is told.
        wait_s: Seconds within which a ps that was lost has to be there again.
    """

    def __init__(
        self,
        state: RecoveryState,
        links: ClusterLinks,
        queue: ClosureQueue,
        creation: Creation,
        events: Events,
        wait_s: float,
    ) -> None:
        self.source: Source | None = None  # set by whoever keeps checkpoints
        self.ended = EndedClosures()
        self._state = state
        self._links = links
        self._ps = links.ps
        self._queue = queue
        self._creation = creation
        self._events = events
        self._wait_s = wait_s
        self._task: asyncio.Task[None] | None = None
        self._lost: dict[str, None] = {}  # names of ps tasks, since the recovery began
        self._loads = 0

    @property
    def is_on(self) -> bool:
        """Whether a recovery is under way."""
        return self._task is not None

    def saved(self, snapshots: Sequence[SnapshotState]) -> None:
        """There is a new checkpoint: what it has cannot be undone any more."""
        self.ended.saved(CutCalls(snapshots), self._queue.is_open)

    def describe(self) -> list[str]:
        """Say what a lost ps would mean, if nothing could be done; for reports."""
        return [] if self.source is not None else [f"{UNSAVED}: a ps that is lost ends the program"]

    def takes_over(self, error: ParameterServerLost) -> bool:
        """A ps is lost; return whether it will be recovered."""
        if self.source is None:
            logger.error("%s cannot be brought back: %s", error.task, UNSAVED)
            return False
        self._lost[error.task] = None
        if self._task is None:
            logger.warning("%s; all ps tasks go back to the newest checkpoint", error.message)
            for link in self._ps.links:
                link.hold()
            self._state.rollback_began()
            self._task = asyncio.get_running_loop().create_task(self._recover())
        return True

    async def close(self) -> None:
        """Give up: what waits for the end of a recovery fails. Cancellation: safe."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._let_go(
                ParameterServerLost(
                    next(iter(self._lost)), "was lost, and the coordinator was closed meanwhile"
                )
            )

    async def _recover(self) -> None:
        began = asyncio.get_running_loop().time()
        try:
            event = await self._attempts(began)
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            lost = ", ".join(self._lost)
            error = ParameterServerLost(
                next(iter(self._lost)),
                f"was lost, and going back to a checkpoint has failed: {exc}",
                hint="restart the program: it goes on from its newest checkpoint",
            )
            error.__cause__ = exc
            logger.error("recovery of %s failed: %s", lost, exc)
            self._task = None
            self._let_go(error)
            self._state.failed(error)
            return
        self._task = None
        self._lost.clear()
        logger.warning(
            "%s recovered in %.2f s: from step %d back to %d, timeline %d; closures undone: %d",
            ", ".join(event.lost), event.seconds, event.from_step, event.to_step, event.timeline,
            len(event.closures),
        )  # fmt: skip
        self._state.recovered()

    def _let_go(self, error: ParameterServerLost) -> None:
        """No ps is recovered any more: whoever waited for that fails."""
        for link in self._ps.links:
            link.lost = link.lost or error
            link.release()

    async def _attempts(self, began: float) -> RollbackEvent:
        for attempt in range(MAX_ATTEMPTS):
            try:
                return await self._attempt(began)
            except (ParameterServerLost, ConnectionLost) as exc:
                if attempt == MAX_ATTEMPTS - 1:
                    raise
                logger.warning("recovery begins anew: %s", exc)
        raise AssertionError("unreachable")

    async def _attempt(self, began: float) -> RollbackEvent:
        links = self._ps.links
        from_step = await self._iterations()
        assert self.source is not None, "checked when it began"
        snapshots = await asyncio.to_thread(self.source)
        if snapshots is None:
            raise CheckpointError("there is no checkpoint yet")
        own = self._links.incarnation
        read = self._checked(snapshots)
        states = [state.for_coordinator(own) for state in read]
        packed = [
            snapshot.state if state is before else state.to_bytes()
            for snapshot, before, state in zip(snapshots, read, states, strict=True)
        ]
        for link in links:
            if reason := link.gone_for_good:
                raise CheckpointError(f"{link.task} {reason}")
            if link.lost is not None:
                link.revive()
        await self._attach_all()
        self._loads += 1
        await all_of([self._prepare(*each) for each in zip(links, snapshots, packed, strict=True)])
        timeline = self._ps.timeline + 1
        self._ps.begin_timeline(timeline)  # first: what is answered by some of them is sent again
        take = RestoreSnapshot(self._loads, timeline, self._links.membership.fences())
        await all_of([link.call(always(take), urgent=True) for link in links])
        to_step = max(state.iterations for state in states)
        event = RollbackEvent(
            tuple(self._lost), timeline, max(from_step, to_step), to_step,
            self.ended.undone(CutCalls(states)), asyncio.get_running_loop().time() - began,
        )  # fmt: skip
        self._events.emit(event)
        # The program is told, so from now on the next one may attach itself to what there is.
        adopt = AdoptShards(own + timeline, last=True)
        orders = [Orders().to_bytes()]
        await all_of([link.call(always(adopt), orders, urgent=True) for link in links])
        for link in links:
            if link.lost is not None:  # after it had answered
                raise link.lost.with_traceback(None)
        for link in links:
            link.release()
        return event

    async def _attach_all(self) -> None:
        """Wait until all ps tasks are there, and serve this coordinator.

        Raises:
            CheckpointError: One is not there in time.
            ParameterServerLost: One is lost again.
        """
        links, patience_s = self._ps.links, [link.lost_after_s for link in self._ps.links]
        for link in links:
            link.lost_after_s = math.inf  # a launcher is starting it
        try:
            async with asyncio.timeout(self._wait_s):
                await all_of([self._links.attach_ps(link) for link in links])
        except TimeoutError as exc:
            away = ", ".join(f"{link.task} at {link.address}" for link in links if not link.is_open)
            raise CheckpointError(
                f"not there within {self._wait_s:g} s: {away or 'a ps that answers'}",
                hint="does something start a ps that has died? psync run does",
            ) from exc
        finally:
            for link, seconds in zip(links, patience_s, strict=True):
                link.lost_after_s = seconds

    def _checked(self, snapshots: Sequence[StoredSnapshot]) -> list[SnapshotState]:
        """Read the states; refuse a checkpoint that is of other variables than there are now."""
        if len(snapshots) != len(self._ps.links):
            raise CheckpointError(
                f"the newest checkpoint is of {len(snapshots)} ps tasks, expected "
                f"{len(self._ps.links)}"
            )
        states = [
            SnapshotState.from_bytes(snapshot.state, str(snapshot.file)) for snapshot in snapshots
        ]
        kept = {(spec.key, spec.variable) for state in states for spec in state.shards}
        if missing := self._creation.created - kept:
            raise CheckpointError(
                f"{len(missing)} shards were created after the newest checkpoint was saved, or by "
                "another program than this one",
                hint="save again after the last variable was declared",
            )
        return states

    async def _iterations(self) -> int:
        """Return how far training was, as far as those know who are left."""

        async def ask(link: PsLink) -> int:
            try:
                async with asyncio.timeout(1.0):
                    received = await link.call(always(AskStatistics()), urgent=True)
            except (PsyncError, TimeoutError):
                return 0
            assert isinstance(received.message, Statistics)
            return int(received.message.counters.get("iterations", 0))

        left = [link for link in self._ps.links if link.lost is None]
        return max(await all_of([ask(link) for link in left]), default=0) if left else 0

    async def _prepare(self, link: PsLink, snapshot: StoredSnapshot, state: bytes) -> None:
        """Let a ps read its snapshot, or send it, where the ps does not find the file."""
        places = json.dumps([list(place) for place in snapshot.places]).encode()
        segments = [state, places]
        load = self._loads
        if not streamed_by_environ(os.environ):
            try:
                by_path = PrepareSnapshot(load, str(snapshot.file))
                await link.call(always(by_path), segments, bulk=True, urgent=True)
                return
            except CheckpointCorrupt:
                raise
            except CheckpointError as exc:
                logger.info("%s cannot read its snapshot (%s): it is sent", link.task, exc.message)
        by_bytes = PrepareSnapshot(load, "")
        await link.call(always(by_bytes), segments[:1], bulk=True, urgent=True)
        for item, first, nbytes, _ in snapshot.places:
            for start in range(0, nbytes, PIECE_BYTES):
                count = min(PIECE_BYTES, nbytes - start)
                piece = await asyncio.to_thread(_read, snapshot.file, first + start, count)
                fill: Message = FillSnapshot(load, item, start)
                await link.call(always(fill), [piece], bulk=True, urgent=True)


def _read(path: Path, start: int, count: int) -> bytes:
    with disk_errors(f"reading {path}"), open(path, "rb") as file:
        file.seek(start)
        return file.read(count)
