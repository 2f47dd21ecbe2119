"""For tests of the rules of synchronous training: replicas, configurations, a group to push to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import msgpack

from psync.errors import PsyncError
from psync.store.ledger import Ledger
from psync.store.snapshot_state import NOTHING, SnapshotState
from psync.store.sync_config import SyncConfig
from psync.sync.steps import Action, Answer, Close, Contribution, Refuse, Replica, SyncSteps
from psync.wire.closure_numbers import PART_BITS

GROUP = 7


def config(needed: int, total: int | None = None, **more: Any) -> SyncConfig:
    return SyncConfig(
        name="opt",
        optimizer={},
        replicas_to_aggregate=needed,
        total_num_replicas=total or needed,
        global_step=(0, 0, 0),
        **more,
    )


def call_of_push(closure: int | None, ordinal: int = 0) -> tuple[int, int] | None:
    return None if closure is None else (closure, ordinal << PART_BITS)


def replica(index: int, incarnation: int = 1) -> Replica:
    return (f"/job:worker/task:{index}", incarnation)


def snapshot_of(rule: SyncSteps) -> SnapshotState:
    return rule.ledger.snapshot(lambda _: None, pending=rule.pending())


def ledger_of(state: SnapshotState) -> Ledger:
    """Return the ledger of a ps that has gone back to a snapshot."""
    ledger = Ledger()
    ledger.restore(state, lambda _: None)
    return ledger


class Pair:
    """The rule on ps 0, and on its backup: both are told the same, and must answer alike.

    The rule is that of ps 0; ``copy`` gives it a backup, in place of the one that it has.

    Args:
        others: How many ps tasks there are but ps 0.
        ledger: Of ps 0.
    """

    def __init__(self, others: int = 1, ledger: Ledger | None = None) -> None:
        self._others = others
        self.rule = SyncSteps(ledger or Ledger(), others)
        self.configs: dict[int, SyncConfig] = {}
        self._backup: SyncSteps | None = None

    def copy(self) -> None:
        """Send a snapshot to a new backup."""
        state = msgpack.decode(msgpack.encode(self.rule.snapshot()))
        self._backup = SyncSteps(ledger_of(snapshot_of(self.rule)), self._others)
        self._backup.restore(state, self.configs)
        self._compare([], [])

    def promote(self) -> None:
        """Let the backup, if there is one, be the rule from now on."""
        if self._backup is not None:
            self.rule, self._backup = self._backup, None

    def define(self, group: int, config: SyncConfig, step: int) -> None:
        """Make a group known."""
        self.configs[group] = config
        self.tell("define", group, config, step)

    def tell(self, what: str, *args: Any) -> list[Action]:
        """Call a method of the rule, on the backup, too; return what it has decided."""
        outcomes = [_outcome(rule, what, args) for rule in (self.rule, self._backup) if rule]
        self._compare(outcomes[0], outcomes[-1])
        if isinstance(outcomes[0], PsyncError):
            raise outcomes[0]
        return outcomes[0] or []

    def _compare(self, one: Any, other: Any) -> None:
        if self._backup is None:
            return
        assert plain(one) == plain(other)
        assert self.rule.snapshot() == self._backup.snapshot()
        assert self.rule.waiting == self._backup.waiting
        assert self.rule.next_deadline() == self._backup.next_deadline()
        assert self.rule.is_settled == self._backup.is_settled
        assert self.rule.pending() == self._backup.pending()
        assert sorted(self.rule.ledger.counted()) == sorted(self._backup.ledger.counted())
        assert self.rule.statistics() == self._backup.statistics()


def _outcome(rule: SyncSteps, what: str, args: Sequence[Any]) -> Any:
    try:
        return getattr(rule.ledger if what == "final_below" else rule, what)(*args)
    except PsyncError as exc:
        return exc


def plain(outcome: Any) -> Any:
    """What a rule has decided, or refused, such that it can be compared."""
    if isinstance(outcome, PsyncError):
        return type(outcome), str(outcome)
    return [
        (act.group, act.replica, act.number, plain(act.error)) if isinstance(act, Refuse) else act
        for act in outcome or ()
    ]


class Steps(SyncSteps):
    """One group, and its replicas' pushes, numbered as they come; there is one ps but ps 0."""

    def __init__(
        self,
        needed: int,
        total: int | None = None,
        *,
        begin: int = 0,
        noted: Sequence[tuple[int, int, int, bytes]] = (),
        final_below: int = 0,
        **more: Any,
    ) -> None:
        noted = replace(NOTHING, counted=tuple(noted), final_below=final_below)
        super().__init__(ledger_of(noted), 1)
        self.define(GROUP, config(needed, total, **more), begin)
        self.numbers: dict[Replica, int] = {}
        self.living: dict[str, int] = {}

    def calls(self) -> list[tuple[int, int, int, bytes]]:
        """(group, closure, ordinal, digest) of each call that a snapshot has."""
        return list(snapshot_of(self).counted)

    def counted(self) -> int:
        """How many pushes count in the present step."""
        return len(self.groups[GROUP].counted)

    def remembered(self, of: Replica) -> list[int]:
        """Which pushes of a replica may still be asked for."""
        return list(self.groups[GROUP].replicas[of].pushes)

    def live(self, *indices: int, now: float = 0.0, incarnation: int = 1) -> list[Action]:
        """These live; ``incarnation`` is that of worker 0."""
        alive = dict(replica(index) for index in indices)
        if 0 in indices:
            alive |= [replica(0, incarnation)]
        missing = [replica(index)[0] for index in range(4) if index not in indices]
        actions: list[Action] = []
        for task, number in self.living.items():
            if alive.get(task) != number and (task, number) in self.numbers:
                actions += self.fence(task, number + 1)
        self.living = alive
        return actions + self.members(alive, missing, now)

    def push(
        self,
        index: int,
        local_step: int,
        *,
        incarnation: int = 1,
        closure: int | None = None,
        ordinal: int = 0,
        variable_set: bytes = b"w",
        weight: float = 1.0,
        number: int = 0,
        acked_below: int = 0,
        others: Sequence[int] = (),
    ) -> list[Action]:
        """Push; ``acked_below`` is the lowest that is still waited for: by default this one."""
        who = replica(index, incarnation)
        if not number:
            number = self.numbers[who] = self.numbers.get(who, 0) + 1
        return self.contribute(
            GROUP,
            Contribution(
                who, number, acked_below or number, call_of_push(closure, ordinal), variable_set,
                local_step, weight, [*others],
            ),
        )  # fmt: skip


def closes(actions: list[Action]) -> list[tuple[int, list[int], bool]]:
    """(step, indices of the workers summed, partial) of each Close."""
    return [
        (act.step, [int(task[-1]) for task, *_ in act.pushes], act.partial)
        for act in actions
        if isinstance(act, Close)
    ]


def answers(actions: list[Action]) -> list[tuple[int, str, int]]:
    """(worker, outcome, token) of each Answer."""
    return [
        (int(act.replica[0][-1]), act.outcome, act.token)
        for act in actions
        if isinstance(act, Answer)
    ]


def refusals(actions: list[Action]) -> list[tuple[int, str]]:
    """(worker, class of the error) of each Refuse."""
    return [
        (int(act.replica[0][-1]), type(act.error).__name__)
        for act in actions
        if isinstance(act, Refuse)
    ]
