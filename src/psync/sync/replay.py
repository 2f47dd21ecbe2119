"""Replay of synchronous entries on a backup, and the state of groups that snapshots omit.

The primary has judged every entry. So ``SyncFollower`` keeps parts, counts pushes and closes steps
without judging again; the rest of an open step is there when the backup is promoted.
``SyncSnapshot`` is the replication state of groups that checkpoints omit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence

from psync.net.peer import Handler, Peer, Reply
from psync.ps.committer import Build
from psync.ps.update import NO_BYTES, set_of
from psync.store.ledger import Client
from psync.sync.cross_ps_sets import ShareNumbers, whole_set_of
from psync.sync.followed_steps import FollowedSteps
from psync.sync.group import Close
from psync.sync.log_entries import entries_of_snapshot, push_of
from psync.sync.ps_sync import PsSync
from psync.sync.step_closer import StepCloser
from psync.sync.step_rounds import ClosedStep
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.recovery_messages import CountPush, SetSteps
from psync.wire.sync_messages import CloseStep, StagePush


class SyncFollower:
    """What a backup does for synchronous steps.

    Args:
        task: Name of the ps that is backed up.
        sync: The groups of the backup.
        shares: Numbers what belongs to other ps tasks. None: not a backup of ps 0.
    """

    def __init__(self, task: str, sync: PsSync, shares: ShareNumbers | None) -> None:
        self.steps: FollowedSteps[ClosedStep] = FollowedSteps()
        self.spread: set[int] = set()  # groups with a variable on several ps tasks
        self._task = task
        self._sync = sync
        self._shares = shares

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who does which entry."""
        return {
            SetSteps: Handler(self._set_steps),
            StagePush: Handler(self._stage),
            CountPush: Handler(self._count),
            CloseStep: Handler(self._close),
        }

    def _set_steps(self, _: Peer, message: SetSteps, __: list[memoryview]) -> Reply:
        for group, config, step, raised in message.groups:
            self._sync.define(group, config)
            if step >= 0:
                self._sync.staging.closed(group, step - 1)
            self._sync.global_steps.note(group, raised)
        return Reply(Done())

    def _stage(self, peer: Peer, message: StagePush, body: list[memoryview]) -> Reply:
        self._sync.define(message.group, message.config)
        known = set_of(peer, message, self._task).look_up(self._sync.store)
        part = self._sync.part_with(message, known, body[0] if body else NO_BYTES)
        replica = (peer.task, peer.incarnation)
        self._sync.keep_judged(message.group, replica, message.push, message.local_step, part)
        return Reply(Done())

    def _count(self, peer: Peer, message: CountPush, body: list[memoryview]) -> Reply:
        group, replica = message.group, (peer.task, peer.incarnation)
        self._sync.define(group, message.config)
        if message.set_id >= 0 and self._shares is not None:
            known = whole_set_of(peer, message.set_id, message.members, self._shares, self._task)
            if message.rows is None:
                known.fit(self._sync.store, tuple(message.lengths), self._task)
            part = self._sync.part_of(message, known, body[0] if body else NO_BYTES)
            self._sync.keep_judged(group, replica, message.push, message.local_step, part)
        if message.spread:
            self.spread.add(group)
        self.steps.count(group, message.step, push_of(message, replica))
        return Reply(Done())

    def _close(
        self, peer: Peer, message: CloseStep, body: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        group, step = message.group, message.step
        self._sync.define(group, message.config)
        if self._shares is not None:
            close = Close(group, step, tuple(message.pushes), partial=False)
            again = ClosedStep(close, self._sync.along(close), message.scales, message.ratios)
            self.steps.close(group, step, message.pushes, again)
        under_way = self._sync.applier.close(message, self._sync.parts_along(peer, message, body))
        return Reply(Done()) if under_way is None else _after(under_way)


async def _after(under_way: Awaitable[None]) -> Reply:
    await under_way
    return Reply(Done())


class SyncSnapshot:
    """The synchronous groups of one ps; see ``backup.SyncState``.

    Args:
        sync: Its groups.
        closer: Decides steps; None: not on ps 0, or not yet.
    """

    def __init__(self, sync: PsSync, closer: StepCloser | None) -> None:
        self._sync = sync
        self._closer = closer

    async def pause(self, why: str) -> None:
        """Close no step from now on; wait for what is being closed."""
        if self._closer is not None:
            await self._closer.phases.pause(why)

    def resume(self, why: str) -> None:
        """Go on."""
        if self._closer is not None:
            self._closer.resume(why)

    def groups(self) -> Iterable[int]:
        """Return all groups that are known."""
        return self._sync.raw_configs()

    def deterministic(self) -> Sequence[str]:
        """Return the names of those that are deterministic."""
        return [raw["name"] for raw in self._sync.raw_configs().values() if raw["deterministic"]]

    def entries(self) -> list[tuple[Client, Build, Sequence[memoryview]]]:
        """Return (client, message, segments) of entries that give a backup all of it."""
        closer, sync = self._closer, self._sync
        return entries_of_snapshot(
            sync.raw_configs(), dict(sync.steps()), sync.global_steps.raised, sync.staging.held(),
            () if closer is None else closer.steps.pending(),
            () if closer is None else closer.spread,
        )  # fmt: skip
