"""Synchronous groups on one ps: the table of their configurations, and their global steps.

``GroupTable`` maps the numbers that connections use to groups. ``GlobalSteps`` raises the global
step that this ps holds, once for each step of its group.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from psync.errors import ConfigurationError, RemoteProtocolError
from psync.net.peer import Handler, Peer, Reply
from psync.numerics.blocks import bytes_of
from psync.ps.committer import Committer
from psync.ps.cooperative_work import LongWork
from psync.ps.locks import PsLocks
from psync.specs import ShardSpec, VariableSpec, dtype_of
from psync.store.step_norms import StepNorms
from psync.store.store import Key, ShardStore
from psync.store.sync_config import SyncConfig
from psync.sync.step_update import Average
from psync.wire.codec import Message
from psync.wire.messages import Done
from psync.wire.sync_messages import RaiseStep

CLOSER = "/job:ps/task:0"
"""Who decides steps."""


@dataclass(slots=True)
class KnownGroup:
    """One group, as a ps knows it."""

    raw: dict[str, Any]  # the configuration as it came
    config: SyncConfig
    closing: int | None = None  # the step that is being applied
    failed: Exception | None = None  # why a step was not applied that was to be
    averages: list[Average] | None = None  # that are kept here; None: not looked up yet


class GroupTable:
    """The groups of one ps under one coordinator.

    Args:
        store: Its shards.
        task: Name of the ps.

    Attributes:
        check: Called with the configuration of a new group, which it may refuse.
    """

    def __init__(self, store: ShardStore, task: str) -> None:
        self.store = store
        self.check: Callable[[SyncConfig], None] = lambda _: None
        self._task = task
        self._groups: dict[int, KnownGroup] = {}

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
            self.check(config)
            self.store.define_optimizer(group, config.optimizer)
            self._groups[group] = KnownGroup(raw, config)
        elif known.config != config:
            raise ConfigurationError(
                f"{known.config.name} on {self._task}: another configuration than at first: "
                f"expected {known.config.to_config()}, got {config.to_config()}"
            )
        return config

    def known(self, group: int, raw: dict[str, Any] | None) -> KnownGroup:
        """Return what is known of a group, which ``define`` makes known."""
        self.define(group, raw)
        return self._groups[group]

    @property
    def has_one_group(self) -> bool:
        """Whether no other group is known."""
        return len(self._groups) == 1

    def raw_config(self, group: int) -> dict[str, Any]:
        """Return the configuration of a group that is defined, as it came."""
        return self._groups[group].raw

    def raw_configs(self) -> dict[int, dict[str, Any]]:
        """Return the configurations of all groups, by their number, as they came."""
        return {number: known.raw for number, known in self._groups.items()}

    def norms(self, group: int) -> StepNorms:
        """Return the norms of a step of a group that is defined; none is known yet."""
        return StepNorms(self.store.rule(group))


GLOBAL_STEP_DTYPE = "int64"

_ONE: np.ndarray = np.ones((), dtype_of(GLOBAL_STEP_DTYPE))


class GlobalSteps:
    """The global steps of one ps under one coordinator.

    Args:
        store: Its shards.
        check_closer: Raises unless a peer is the ps 0 that decides.
        work: Waits for shards that are busy.
        locks: Who must wait.
        committer: In whose order all is done, once it has begun.
    """

    def __init__(
        self,
        store: ShardStore,
        check_closer: Callable[[Peer], None],
        work: LongWork,
        locks: PsLocks,
        committer: Committer,
    ) -> None:
        self._committer = committer
        self._raised: dict[int, int] = {}  # by group: the last step for which it was raised
        self._store = store
        self._check_closer = check_closer
        self._work = work
        self._locks = locks

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

    async def read(self, config: SyncConfig) -> int:
        """Return the present value of a global step that is on this ps.

        Raises:
            ConfigurationError: It is no single integer.
            UnknownVariableError: It is not here.

        Cancellation: Safe.
        """
        spec = self._store.spec(config.global_step[1:])
        if spec.size != 1 or spec.dtype != GLOBAL_STEP_DTYPE:
            raise ConfigurationError(
                f"{config.name}: its global step {spec} has shape {spec.shape} {spec.dtype}, "
                f"expected one element of {GLOBAL_STEP_DTYPE}"
            )
        (block,) = await self._work.when_idle(self._store.read, spec.key)
        return int(bytes_of(block).view(dtype_of(spec.dtype))[0])

    def _raise_for(self, peer: Peer, message: RaiseStep, _: list[memoryview]) -> Awaitable[Reply]:
        self._check_closer(peer)
        return self._raise_and_answer((peer.task, peer.incarnation), message)

    async def _raise_and_answer(self, client: tuple[str, int], message: RaiseStep) -> Reply:
        await self.raise_one(client, message)
        return Reply(Done())

    def raise_at_once(self, message: RaiseStep) -> bool:
        """Raise a global step now; False: nothing was done, since that takes longer."""
        key = (message.variable, message.index)
        if self._committer.is_begun or self._store.busy(key) or self._locks.table.blocks([key]):
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
            if not self._committer.is_begun:
                await self._work.when_idle(self._raise, key, message)
            else:
                await self._committer.commit(
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


def raising(config: SyncConfig, group: int, step: int) -> tuple[int, RaiseStep]:
    """Return which ps has a group's global step, and what raises it for a step that is applied."""
    ps, variable, index = config.global_step
    return ps, RaiseStep(group, step, variable, index)


def step_variable(config: SyncConfig) -> VariableSpec:
    """Describe the shard of a global step, on another ps, as a variable of its own."""
    ps, variable, index = config.global_step
    name = f"{config.name}: global step"
    shard = ShardSpec(name, variable, index, 0, (), GLOBAL_STEP_DTYPE, ps)
    return VariableSpec(name, variable, (), GLOBAL_STEP_DTYPE, False, (shard,), "")
