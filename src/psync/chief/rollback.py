"""The steps of a rollback: all ps tasks restore the snapshots of the newest checkpoint.

    READ    the newest checkpoint, and how far training was
    ATTACH  every ps, once it is there
    LOAD    PrepareSnapshot, FillSnapshot: each ps reads its file, or is sent it
    SWITCH  RestoreSnapshot: a new timeline
    CREATE  CreateShards, where a ps was lost: in place of READ, LOAD and SWITCH of a fresh start
    ADOPT   AdoptShards: the next program may attach itself to what there is

When they are taken, says ``recovery_rule``. Everything else that talks to ps tasks is paused
meanwhile, see ``PsLink.hold``. What was sent in the old timeline is refused by fences: every worker
bears a new incarnation afterwards.

Source: docs/design.md, "Rollback".
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from psync.checkpoints.files import StoredSnapshot, disk_errors, streamed_by_environ
from psync.chief.cluster_links import ClusterLinks
from psync.chief.creation import Creation
from psync.chief.reattachment import OwnOptimizers
from psync.chief.recovery_rule import RollbackStep
from psync.client.calls import all_of
from psync.client.ps_link import PsLink, always, ask
from psync.errors import CheckpointCorrupt, CheckpointError, PsyncError
from psync.store.reattach import Orders
from psync.store.snapshot_state import SnapshotState
from psync.store.untrusted_json import to_json
from psync.wire.codec import Message
from psync.wire.messages import (
    AdoptShards,
    AskStatistics,
    FillSnapshot,
    PrepareSnapshot,
    RestoreSnapshot,
    Statistics,
)

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Sent at once where a ps cannot read the file itself."""

Source = Callable[[], Sequence[StoredSnapshot] | None]
"""Returns the snapshots of the newest checkpoint, one for each ps; None: there is none. Blocks."""


@dataclass(eq=False)
class RollbackSteps:
    """Takes the steps of the rollbacks of one coordinator. All raise as ``PsLink.call``."""

    cluster: ClusterLinks
    creation: Creation  # knows what was created
    optimizers: OwnOptimizers  # keep the learning rates that the program has set
    wait_s: float  # seconds within which a ps that was lost has to be there again
    # Of the present rollback, once it has been read: how far training was, what it goes back to.
    from_step: int = 0
    states: Sequence[SnapshotState] = ()
    snapshots: Sequence[StoredSnapshot] = ()
    loads: int = 0  # so far

    async def take(self, step: RollbackStep, source: Source | None, lost: Collection[int]) -> None:
        """Take one step.

        Args:
            step: That.
            source: Has the checkpoints.
            lost: The ps tasks that were lost since the recovery began.

        Raises:
            CheckpointError: It is not possible.

        Cancellation: Safe.
        """
        if step is RollbackStep.READ:
            await self._read(source)
        elif step is RollbackStep.ATTACH:
            await self._attach()
        elif step is RollbackStep.LOAD:
            self.loads += 1
            each = zip(self.cluster.ps.links, self.snapshots, self.states, strict=True)
            await all_of([self._prepare(*one) for one in each])
        elif step is RollbackStep.CREATE:
            await self.creation.create_again(lost)
        elif step is RollbackStep.SWITCH:
            ps = self.cluster.ps
            ps.begin_timeline(ps.timeline + 1)  # first: what some of them answer is sent again
            fences = self.cluster.membership.fences()
            await self._ask_all(RestoreSnapshot(self.loads, ps.timeline, fences))
        else:
            lineage = self.cluster.endpoint.incarnation + self.cluster.ps.timeline
            adopt = AdoptShards(lineage, last=True)
            await self._ask_all(adopt, [Orders().to_bytes()])

    async def _ask_all(self, message: Message, segments: Sequence[bytes] = ()) -> None:
        links = self.cluster.ps.links
        await all_of([link.call(always(message), segments, urgent=True) for link in links])

    async def _read(self, source: Source | None) -> None:
        """Read the states; refuse a checkpoint that is of other variables than there are now."""
        self.from_step = await self._iterations()
        assert source is not None, "checked when it began"
        snapshots = await asyncio.to_thread(source)
        if snapshots is None:
            raise CheckpointError("there is no checkpoint yet")
        if len(snapshots) != len(self.cluster.ps.links):
            raise CheckpointError(
                f"the newest checkpoint has {len(snapshots)} ps tasks, expected "
                f"{len(self.cluster.ps.links)}"
            )
        states = [SnapshotState.from_bytes(each.state, str(each.file)) for each in snapshots]
        kept = {(spec.key, spec.variable) for state in states for spec in state.shards}
        if missing := self.creation.created - kept:
            raise CheckpointError(
                f"{len(missing)} shards were created after the newest checkpoint was saved, or by "
                "another program than this one",
                hint="save again after the last variable was declared",
            )
        self.snapshots = snapshots
        incarnation, optimizers = self.cluster.endpoint.incarnation, self.optimizers.listed()
        self.states = [
            state.for_coordinator(incarnation).with_rates(optimizers) for state in states
        ]

    async def _iterations(self) -> int:
        """Return how far training was, as far as those know who are left."""

        async def one(link: PsLink) -> int:
            try:
                async with asyncio.timeout(1.0):
                    answer, _ = await ask(link, AskStatistics(), Statistics, urgent=True)
            except (PsyncError, TimeoutError):
                return 0
            return int(answer.counters.get("iterations", 0))

        left = [link for link in self.cluster.ps.links if link.lost is None]
        return max(await all_of([one(link) for link in left])) if left else 0

    async def _attach(self) -> None:
        """Wait until all ps tasks are there, and serve this coordinator."""
        links = self.cluster.ps.links
        for link in links:
            if reason := link.gone_for_good:
                raise CheckpointError(f"{link.task} {reason}")
            if link.lost is not None:
                link.revive()
        patience_s = [link.lost_after_s for link in links]
        for link in links:
            link.lost_after_s = math.inf  # a launcher is starting it
        try:
            async with asyncio.timeout(self.wait_s):
                await all_of([self.cluster.served.attach(link) for link in links])
        except TimeoutError as exc:
            away = ", ".join(f"{link.task} at {link.address}" for link in links if not link.is_open)
            raise CheckpointError(
                f"not reachable within {self.wait_s:g} s: {away or 'a ps that answers'}",
                hint="a supervisor must restart dead ps tasks; psync run does",
            ) from exc
        finally:
            for link, seconds in zip(links, patience_s, strict=True):
                link.lost_after_s = seconds

    async def _prepare(self, link: PsLink, snapshot: StoredSnapshot, state: SnapshotState) -> None:
        """Let a ps read its snapshot, or send it, where the ps does not find the file."""
        packed = state.to_bytes()
        if not streamed_by_environ(os.environ):
            places = to_json(snapshot.places)
            try:
                await self._send(
                    link, PrepareSnapshot(self.loads, str(snapshot.file)), packed, places
                )
                return
            except CheckpointCorrupt:
                raise
            except CheckpointError as exc:
                logger.info(
                    "%s cannot read its snapshot (%s): the chief sends it", link.task, exc.message
                )
        await self._send(link, PrepareSnapshot(self.loads, ""), packed)
        for item, first, nbytes, _ in snapshot.places:
            for start in range(0, nbytes, PIECE_BYTES):
                count = min(PIECE_BYTES, nbytes - start)
                piece = await asyncio.to_thread(_read, snapshot.file, first + start, count)
                await self._send(link, FillSnapshot(self.loads, item, start), piece)

    async def _send(self, link: PsLink, message: Message, *segments: bytes) -> None:
        await link.call(always(message), segments, bulk=True, urgent=True)


def _read(path: Path, start: int, count: int) -> bytes:
    with disk_errors(f"reading {path}"), open(path, "rb") as file:
        file.seek(start)
        return file.read(count)
