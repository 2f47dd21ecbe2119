"""The synchronous groups that one ps knows, by the numbers that connections use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psync.cluster import parse_task_name
from psync.errors import ConfigurationError, RemoteProtocolError
from psync.numerics.memory import bytes_of
from psync.ps.cooperative_work import LongWork
from psync.specs import ShardSpec, VariableSpec, dtype_of
from psync.store.ledger import Client
from psync.store.store import Key, ShardStore
from psync.store.sync_config import SyncConfig
from psync.sync.pushes import Close
from psync.sync.step_update import GLOBAL_STEP_DTYPE, Average

CLOSER = "/job:ps/task:0"
"""Who decides steps."""

FROM_CLOSER: Client = (CLOSER, 0)
"""In place of a client: the log says what ps 0 has decided, whoever that is now."""

Listed = list[tuple[int, float]] | None
"""Factors of variables, as a message has them."""


@dataclass(slots=True)
class OutgoingStep:
    """On ps 0, a step that is decided: what the ps tasks are told until all have applied it."""

    close: Close
    is_measured: bool = False  # the factors are known, where there are any
    scales: Listed = None
    ratios: Listed = None


@dataclass(slots=True)
class KnownGroup:
    """One group, as a ps knows it."""

    raw: dict[str, Any]  # the configuration as it came
    config: SyncConfig
    touched: Sequence[Key] = ()  # by its last step, which is perhaps being applied
    averages: list[Average] | None = None  # that are kept here; None: not looked up yet
    spread: bool = False  # on ps 0: whether a variable of a push lies on several ps tasks
    outgoing: OutgoingStep | None = None  # likewise


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
        self._index = parse_task_name(task)[1]
        self._groups: dict[int, KnownGroup] = {}

    def known(self, group: int, raw: dict[str, Any] | None) -> KnownGroup:
        """Return what is known of a group; make it and its optimizer known if they are not yet.

        Args:
            group: Its number.
            raw: Its configuration as it came; None: it is known.

        Raises:
            ConfigurationError: It is none, or another one than at first.
            RemoteProtocolError: It is not known.
        """
        known = self._groups.get(group)
        if known is not None and (raw is None or raw == known.raw):
            return known
        if raw is None:
            raise RemoteProtocolError(f"{self._task}: synchronous group {group} is not defined")
        config = SyncConfig.from_config(raw)
        if known is None:
            self.check(config)
            self.store.define_optimizer(group, config.optimizer)
            known = self._groups[group] = KnownGroup(raw, config)
        elif known.config != config:
            raise ConfigurationError(
                f"{known.config.name} on {self._task}: a different configuration than at first: "
                f"expected {known.config.to_config()}, got {config.to_config()}"
            )
        return known

    def outgoing(self) -> list[OutgoingStep]:
        """Return the steps that are outgoing."""
        return [known.outgoing for known in self._groups.values() if known.outgoing is not None]

    def raw_configs(self) -> dict[int, dict[str, Any]]:
        """Return the configurations of all groups, by their number, as they came."""
        return {number: known.raw for number, known in self._groups.items()}

    def global_step(self, config: SyncConfig) -> Key | None:
        """Return the shard of a group's global step, if it is on this ps."""
        ps, *key = config.global_step
        return (key[0], key[1]) if ps == self._index else None

    async def read_global_step(self, config: SyncConfig, work: LongWork) -> int:
        """Return the present value of a global step that is on this ps.

        Raises:
            ConfigurationError: It is no single integer.
            UnknownVariableError: It is not here.

        Cancellation: Safe.
        """
        spec = self.store.spec(config.global_step[1:])
        if spec.size != 1 or spec.dtype != GLOBAL_STEP_DTYPE:
            raise ConfigurationError(
                f"{config.name}: its global step {spec} has shape {spec.shape} {spec.dtype}, "
                f"expected one element of {GLOBAL_STEP_DTYPE}"
            )
        (block,) = await work.when_idle(self.store.read, spec.key)
        return int(bytes_of(block).view(dtype_of(spec.dtype))[0])


def step_variable(config: SyncConfig) -> VariableSpec:
    """Describe the shard of a global step, on another ps, as a variable of its own."""
    ps, variable, index = config.global_step
    name = f"{config.name}: global step"
    shard = ShardSpec(name, variable, index, 0, (), GLOBAL_STEP_DTYPE, ps)
    return VariableSpec(name, variable, (), GLOBAL_STEP_DTYPE, False, (shard,), "")
