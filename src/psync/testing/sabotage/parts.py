"""The parts of a task that does something wrong: subclasses, and whose place each takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from psync.checkpoints.files import Writer
from psync.client.ps import PlanUpdate
from psync.client.sync import PartAnswers
from psync.net.connection import Connection
from psync.net.platform import Parts, Platform
from psync.ps.admission import UpdateGate
from psync.ps.updates import PsUpdates
from psync.ps_task import PsTask
from psync.store.commit_log import CommitLog
from psync.store.ledger import Ledger
from psync.store.store import ShardStore
from psync.sync.ps_services import PsServices
from psync.sync.step_closer import StepCloser
from psync.sync.steps import SyncSteps
from psync.testing.sabotage import apply_log as apply_logs
from psync.testing.sabotage.apply_log import LoggedServices, LoggedStore, LoggedUpdates
from psync.testing.sabotage.early_writer import EarlyWriter
from psync.testing.sabotage.failpoints import Failpoints
from psync.testing.sabotage.interrupted import SteppedCloser, SteppedParts, SteppedUpdate
from psync.testing.sabotage.message_loss import LossyConnection, MessageLosses
from psync.testing.sabotage.places import PLACES, with_places
from psync.testing.sabotage.ps import SabotagedPs
from psync.testing.sabotage.switches import switched_off
from psync.testing.sabotage.weakened_rules import (
    HastyCloser,
    OpenGate,
    WeakCommitLog,
    WeakLedger,
    WeakSteps,
)

T = TypeVar("T")

WITH_PLACES = frozenset(place.cls for place in PLACES)

WITHOUT: Mapping[str, tuple[type, type]] = {
    "dedup": (Ledger, WeakLedger),
    "fencing": (Ledger, WeakLedger),
    "low_water": (Ledger, WeakLedger),
    "timeline": (Ledger, WeakLedger),
    "staleness": (SyncSteps, WeakSteps),
    "staged_commit": (StepCloser, HastyCloser),
    "one_cut": (UpdateGate, OpenGate),
    "replica_ack": (CommitLog, WeakCommitLog),
    "commit_marker": (Writer, EarlyWriter),
}
"""By the safeguard that is switched off."""


class SabotagedParts(Parts):
    """The parts of one task, with which something goes wrong on purpose.

    Args:
        failpoints: At which it dies or fails; None: none is armed yet.
        without: Safeguards that are switched off, see ``switches``.
        losses: Requests of others that are lost here.
        apply_log: Directory in which a ps writes down what it applies; "": none.
    """

    def __init__(
        self,
        failpoints: Failpoints | None = None,
        *,
        without: frozenset[str] = frozenset(),
        losses: MessageLosses | None = None,
        apply_log: str = "",
    ) -> None:
        self.failpoints = Failpoints() if failpoints is None else failpoints
        self._without = without
        self._losses = losses
        self._apply_log = apply_log
        self._made: dict[type, type] = {}
        self._instead: dict[type, type] = {
            PsTask: SabotagedPs, PlanUpdate: SteppedUpdate, PartAnswers: SteppedParts,
            StepCloser: SteppedCloser,
        }  # fmt: skip
        self._instead.update(WITHOUT[name] for name in without & WITHOUT.keys())
        if losses is not None:
            self._instead[Connection] = LossyConnection
        if apply_log:
            self._instead |= {
                ShardStore: LoggedStore, PsUpdates: LoggedUpdates, PsServices: LoggedServices,
            }  # fmt: skip

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> SabotagedParts:
        """Return those that the variables ask for.

        Raises:
            ConfigurationError: One of them cannot be understood.
        """
        return cls(
            Failpoints.from_environment(environ),
            without=switched_off(environ),
            losses=MessageLosses.from_environment(environ),
            apply_log=environ.get(apply_logs.VARIABLE, ""),
        )

    def of(self, cls: type[T]) -> type[T]:
        """Return what takes the place of a class; itself, if nothing does."""
        made = self._made.get(cls)
        if made is None:
            made = self._made[cls] = self._subclass_of(cls)
        return cast(type[T], made)

    def _subclass_of(self, cls: type) -> type:
        base = self._instead.get(cls, cls)
        if any(issubclass(cls, each) for each in WITH_PLACES):
            base = with_places(base, cls)
        if base is cls:
            return cls
        # A class of this task's own: what its parts have to know is no argument of theirs.
        given = {
            "failpoints": self.failpoints, "without": self._without, "losses": self._losses,
            "apply_log": self._apply_log, "of_backup": self.of_backup,
        }  # fmt: skip
        return type(cls.__name__, (base,), given)

    def of_backup(self) -> SabotagedParts:
        """Return those of a backup in the same process."""
        failpoints = self.failpoints.of_backup()
        if failpoints is self.failpoints:
            return self
        return SabotagedParts(
            failpoints, without=self._without, losses=self._losses,
            apply_log=self._apply_log,
        )  # fmt: skip


def failpoints_of(platform: Platform) -> Failpoints:
    """Return those of a task whose platform has them."""
    assert isinstance(platform.parts, SabotagedParts), "a platform of a test"
    return platform.parts.failpoints
