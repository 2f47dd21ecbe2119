"""The synchronous groups that one ps knows, and what they were defined as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psync.errors import ConfigurationError, RemoteProtocolError
from psync.store.step_norms import StepNorms
from psync.store.store import ShardStore
from psync.store.sync_config import SyncConfig
from psync.sync.step_update import Average

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
    """

    def __init__(self, store: ShardStore, task: str) -> None:
        self.store = store
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
