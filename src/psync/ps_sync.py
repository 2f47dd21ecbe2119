"""Synchronous training on every ps: keeps parts of pushes, applies the mean that ps 0 decides.

Layer: L3. Imports: errors, blocks, store, ledger, staging, sync_config, platform, rpc, updates,
long_work, step_updates, wire.

One object serves one coordinator, with its store and its ledger; a newer one gets another.

    message       then
    StagePush     check, take memory, keep the buffer it arrives in (``staging``)
    CloseStep     the mean of the named pushes is applied, shard by shard, moving averages
                  follow, and the group's step is raised here; a repetition changes nothing

Small steps are applied within the turn of the loop in which they are closed, large ones block
by block; each is carried to its end, whatever becomes of the connection to ps 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from psync.blocks import BlockPool
from psync.errors import ConfigurationError, RemoteProtocolError, UsageError
from psync.ledger import Ledger
from psync.long_work import LongWork
from psync.platform import Platform
from psync.rpc import Handler, Peer, Reply
from psync.staging import Staging
from psync.step_updates import Average, Part, StepUpdate, averages_of
from psync.store import ShardStore
from psync.sync_config import SyncConfig
from psync.updates import memory_for, set_of
from psync.wire.messages import CloseStep, Contribute, Done, Message, Staged, StagePush

CLOSER = "/job:ps/task:0"
"""Who decides steps."""


@dataclass(slots=True)
class _Group:
    raw: dict[str, Any]  # the configuration as it came
    config: SyncConfig
    closing: int | None = None  # the step that is being applied
    averages: list[Average] | None = None  # that are kept here; None: not looked up yet


class PsSync:
    """The synchronous groups of one ps under one coordinator.

    Args:
        platform: Limits and failpoints.
        task: Name of the ps.
        store: Its shards.
        ledger: Knows who has been replaced.
        work: What takes long.
        pool: Memory for what comes in.
    """

    def __init__(
        self,
        platform: Platform,
        task: str,
        store: ShardStore,
        ledger: Ledger,
        work: LongWork,
        pool: BlockPool,
    ) -> None:
        self.store = store
        self.ledger = ledger
        self.work = work
        self._staging = Staging(platform.limits.staging_bytes, task)
        self._failpoints = platform.failpoints
        self._task = task
        self._pool = pool
        self._groups: dict[int, _Group] = {}

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which message."""
        return {
            StagePush: Handler(self._stage, self.prepare_part),
            CloseStep: Handler(self._close_for),
        }

    def steps(self) -> list[tuple[int, int]]:
        """Return (group, step) of each group that has closed a step here; not to be changed."""
        return self._staging.steps()

    def fence(self, task: str, below: int) -> None:
        """Take nothing more from incarnations of ``task`` below ``below``."""
        self._staging.fence(task, below)

    def statistics(self) -> dict[str, int]:
        """Return sizes and counters of what is staged."""
        return dataclasses.asdict(self._staging.statistics())

    # Groups.

    def define(self, group: int, raw: dict[str, Any] | None) -> SyncConfig:
        """Make a group and its optimizer known; the same again changes nothing.

        Args:
            group: Its number.
            raw: Its configuration as it came; None: it is known.

        Raises:
            ConfigurationError: It is none, or another one than at first.
            RemoteProtocolError: It is not known.
        """
        known = self._groups.get(group)
        if known is not None and (raw is None or raw == known.raw):
            return known.config
        if raw is None:
            raise RemoteProtocolError(f"{self._task}: synchronous group {group} is not defined")
        config = SyncConfig.from_config(raw)
        if known is None:
            self.store.define_optimizer(group, config.optimizer)
            self._groups[group] = _Group(raw, config)
        elif known.config != config:
            raise ConfigurationError(
                f"{known.config.name} on {self._task}: another configuration than at first: "
                f"expected {known.config.to_config()}, got {config.to_config()}"
            )
        return config

    def raw_config(self, group: int) -> dict[str, Any]:
        """Return the configuration of a group that is defined, as it came."""
        return self._groups[group].raw

    # Staging.

    def prepare_part(
        self, peer: Peer, message: StagePush | Contribute, lengths: tuple[int, ...]
    ) -> Sequence[memoryview]:
        """Check everything that needs no bytes before memory is taken for them."""
        self.ledger.check_incarnation(peer.task, peer.incarnation)
        known = set_of(peer, message, self._task).look_up(self.store)
        known.check_lengths(lengths, self._task)
        config = self.define(message.group, message.config)
        replica = (peer.task, peer.incarnation)
        self._staging.check(
            message.group, replica, message.push, message.local_step, known.nbytes, config
        )
        return memory_for(self._pool, known.nbytes)  # what is stale is dropped once it is here

    def _stage(self, peer: Peer, message: StagePush, body: list[memoryview]) -> Reply:
        return Reply(Staged(not self.stage_part(peer, message, body)))

    def stage_part(
        self, peer: Peer, message: StagePush | Contribute, body: list[memoryview]
    ) -> bool:
        """Keep a part that has arrived in the memory of ``prepare_part``; False: it is stale."""
        known = set_of(peer, message, self._task).look_up(self.store)
        whole = known.body_of(body, self._task)
        part = Part(known, known.gradients(self.store, message.group, whole))
        replica = (peer.task, peer.incarnation)
        return self._staging.stage(message.group, replica, message.push, message.local_step, part)

    # Closing.

    def _close_for(
        self, peer: Peer, message: CloseStep, _: list[memoryview]
    ) -> Reply | Awaitable[Reply]:
        self.ledger.check_incarnation(peer.task, peer.incarnation)
        if peer.task != CLOSER:
            raise UsageError(f"{self._task}: {peer.task} may not close a step, only {CLOSER}")
        under_way = self.close_step(message)
        return Reply(Done()) if under_way is None else _done_after(under_way)

    def close_step(self, message: CloseStep) -> Awaitable[None] | None:
        """Apply a step that ps 0 has decided.

        Returns:
            None if it is applied now; else what to wait for.

        Raises:
            RemoteProtocolError: Another step of the group is being applied.
            ConfigurationError: Moving averages are not beside their variables.
        """
        group, step = message.group, message.step
        self.define(group, message.config)
        known = self._groups[group]
        if known.closing is not None:
            if known.closing != step:
                raise RemoteProtocolError(
                    f"{self._task}: step {step} of {known.config.name} is to be closed while "
                    f"step {known.closing} is being applied"
                )
            return self._closed_by_another(known, step)
        present = self._staging.step(group)
        if present is not None and step < present:
            return None
        update = self._gather(message, known)
        update.begin()
        if not self.work.fits_now(self.store, update.touched, sum(update.costs)):
            known.closing = step
            return self.work.to_the_end(self._apply_slowly(update, known))
        try:
            update.at_once()
        except Exception as exc:
            self.work.give_up(exc)
            raise
        self._closed(update)
        return None

    async def _closed_by_another(self, known: _Group, step: int) -> None:
        """Wait for the end of a closing that another message began."""
        while known.closing == step:
            await self.work.next_turn()

    def _gather(self, message: CloseStep, known: _Group) -> StepUpdate:
        """Say what a step changes here; nothing has changed yet if this raises."""
        if known.averages is None:
            known.averages = averages_of(self.store, known.config, self._task)
        parts: list[Part] = []
        weights: list[float] = []
        for part, weight in self._staging.take(message.group, message.step, message.pushes):
            parts.append(part)
            weights.append(weight)
        update = StepUpdate(self.store, message.group, known.config, message.step, known.averages)
        update.gather(parts, weights)
        return update

    async def _apply_slowly(self, update: StepUpdate, known: _Group) -> None:
        try:
            await self.work.shard_by_shard(update.costs, update.work)
        except Exception as exc:
            if not self.work.is_torn:
                self.work.give_up(exc)  # the shards are whole, the step is not
            raise
        known.closing = None
        try:
            self._closed(update)
        finally:
            self.work.wake()  # repetitions that wait for the end

    def _closed(self, update: StepUpdate) -> None:
        self._staging.closed(update.group, update.step)
        self._failpoints.hit("ps.step.applied")


async def _done_after(under_way: Awaitable[None]) -> Reply:
    await under_way
    return Reply(Done())
