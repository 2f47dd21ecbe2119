"""Rules without one of their safeguards: what ``switches`` puts in their place.

Each is the rule itself, told something wrong. So the code that trains knows nothing of switches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from psync.net.platform import PerProcess
from psync.ps.admission import UpdateGate
from psync.store.commit_log import CommitLog
from psync.store.ledger import Client, Ledger, Ticket
from psync.sync.steps import Action, Contribution, SyncSteps
from psync.testing.sabotage.interrupted import SteppedCloser

CALLS_KEPT = 2
"""Closures of which a ledger without its low-water mark knows calls."""


_numbers = PerProcess(lambda: itertools.count(1))


class WeakLedger(Ledger):
    """A ledger that lacks what ``without`` names.

    Attributes:
        spared: By task, below which incarnation it is served although it was told of a roll-back.
    """

    without: frozenset[str] = frozenset()
    spared: Mapping[str, int] = {}

    def judge(
        self,
        client: Client,
        sequence: int,
        acked_below: int,
        closure: int | None,
        ordinal: int,
        variable_set: int | bytes,
        variables: Sequence[str] = (),
        spread: Sequence[Sequence[int]] = (),
        *,
        arrived: bool = False,
    ) -> Ticket:
        """Judge an update, or what it is made out to be."""
        client = self._judged_as(client)
        if "dedup" in self.without:  # each message is the first of its kind
            sequence = acked_below = next(_numbers())
            closure = None
        ticket = super().judge(
            client, sequence, acked_below, closure, ordinal, variable_set, variables, spread,
            arrived=arrived,
        )  # fmt: skip
        if "low_water" in self.without:
            self._forget_early()
        return ticket

    def check_incarnation(self, task: str, incarnation: int) -> None:
        """Raise FencedError if ``incarnation`` of ``task`` is not served any more."""
        if "fencing" not in self.without and not self._floor <= incarnation < self.spared.get(
            task, 0
        ):
            super().check_incarnation(task, incarnation)

    def fence(self, task: str, incarnation: int) -> None:
        """Serve only this and newer incarnations of ``task`` from now on."""
        if "fencing" not in self.without or "#" in task:
            super().fence(task, incarnation)

    def is_settled(self, client: Client, sequence: int) -> bool:
        """Return whether a message will change nothing here any more; a cut asks."""
        return bool(self.without & {"dedup", "fencing"}) or super().is_settled(client, sequence)

    def final_below(self, closure: int, kept: Iterable[tuple[int, int]] = ()) -> None:
        """Forget the calls of all closures below ``closure``."""
        if "low_water" not in self.without:
            super().final_below(closure, kept)

    def went_back(self, fences: Iterable[tuple[str, int]]) -> None:
        """This is that of a snapshot from now on.

        Args:
            fences: Of each task, the lowest incarnation that works in the new timeline.
        """
        if "timeline" in self.without:
            self.spared = dict(fences)

    def _judged_as(self, client: Client) -> Client:
        """Return what takes the place of a client.

        An incarnation that would be refused is a client of its own, which nobody replaces.
        """
        task, incarnation = client
        served_on = "fencing" in self.without or incarnation < self.spared.get(task, 0)
        return (f"{task}#{incarnation}", incarnation) if served_on and "#" not in task else client

    def _forget_early(self) -> None:
        """A cache that is full forgets the oldest."""
        for number in sorted(self._closures)[: max(0, len(self._closures) - CALLS_KEPT)]:
            del self._closures[number]


class WeakSteps(SyncSteps):
    """Synchronous steps in which no push is stale."""

    def contribute(self, group: int, contribution: Contribution) -> list[Action]:
        """Judge a push as if its values were those of the present step."""
        now = self.present(group)
        return super().contribute(group, msgspec.structs.replace(contribution, local_step=now))


class HastyCloser(SteppedCloser):
    """One to whom a push is complete when its own part is there."""

    def took(self, request: Any, part: Any) -> None:
        """Take a part, and let the rule decide at once."""
        super().took(request, part)
        self._go_on({part.key} & self._here.keys())


class OpenGate(UpdateGate):
    """A gate that holds nothing back, so that each ps freezes when it likes."""

    def holds(self, client: Client, sequence: int) -> bool:
        """Return whether a message has to wait."""
        return False

    def unsettled(self, updates: Iterable[tuple[Client, int]]) -> list[tuple[Client, int]]:
        """Return those messages that may still change something here: none is waited for."""
        return []


class WeakCommitLog(CommitLog):
    """A log whose entries are done at once, whatever the backup has of them."""

    released = property(lambda self: self.last, lambda *_: None)
