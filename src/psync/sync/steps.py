"""The rule of synchronous steps on ps 0: which pushes count, when a step closes, who gets a token.

A push arrives here when all its parts are held by ps tasks, or when it is stale. For each the first
line that fits decides:

    the push                                             what becomes of it
    training has ended, or the group is broken           Refuse
    same replica, same number, answered                  the same Answer again
    same replica, same number, waiting                   it goes on waiting
    its replica has acknowledged the answer              Refuse: it came late, nobody waits for it
    of an incarnation that was replaced                  Refuse: FencedError
    its closure is final, or made the same call before   "duplicate", then a token
    local step below the group's step, see ``Group``     "stale", then a token
    its replica has used all bound tokens of the step    "stale", then a token
    else                                                 it counts, then a token

One staleness decision for a whole push, over all variables and all ps tasks: TensorFlow's
accumulators decide one by one.

A step is closed when its target is reached, or as a partial one when no other worker will or can
come; see ``_close_what_is_due``. Close means that it is decided, and ``outgoing_steps`` carries it
to all ps tasks; ``closed`` says that they have applied it. In between the group is at the next step
already, and no other Close of it is under way. Pushes with a part on every ps get their tokens with
the Close, as each ps answers when it has applied the step; all others when it is ``closed``, first
in, first out.

Source: TensorFlow's ``SyncReplicasOptimizer``; Chen et al. 2016 for backup replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from psync.errors import (
    FencedError,
    LocalProtocolError,
    NotEnoughReplicas,
    PsyncError,
    TrainingEnded,
)
from psync.store.sync_config import SyncConfig
from psync.sync.group import Group
from psync.sync.pushes import Action, Close, Contribution, Refuse
from psync.sync.tokens import Replica
from psync.wire.closure_numbers import Finality


class _Groups(dict[int, Group]):
    """Those that are defined, by their numbers."""

    def __missing__(self, group: int) -> Group:
        raise LocalProtocolError(f"synchronous group {group} is not defined")


class RuleState(msgspec.Struct, eq=False):
    """What a backup has of the rule, too, beside its groups and which closures are final."""

    incarnations: dict[str, int] = msgspec.field(default_factory=dict)
    """The newest known of each task that pushed."""
    alive: dict[str, int] | None = None  # None: nobody has said so far
    missing: tuple[str, ...] = ()
    now: float = 0.0  # when this was said
    in_flight: list[int] = msgspec.field(default_factory=list)  # closures; none: more may start
    ended: str | None = None  # why
    noted: list[tuple[int, int, int, bytes]] = msgspec.field(default_factory=list)
    """Calls of groups to be defined."""


class SyncSteps:
    """All synchronous groups of one cluster. Single owner, no clock; never blocks.

    Args:
        others: How many ps tasks there are but ps 0.

    Attributes:
        is_short: Whether fewer replicas live than some group needs: ``next_deadline`` may be one.
    """

    def __init__(self, others: int = 0) -> None:
        self._others = others
        self._groups = _Groups()
        self.is_short = False
        self._final = Finality()
        self._state = RuleState()

    # Groups.

    def define(self, group: int, config: SyncConfig, initial_step: int) -> None:
        """Make a group known; the same again changes nothing.

        Args:
            group: Its number.
            config: What its optimizer said.
            initial_step: The value of the global step.
        """
        if group in self._groups:
            return
        known = self._groups[group] = Group(
            number=group, config=config, others=self._others,
            step=initial_step, first_step=initial_step,
        )  # fmt: skip
        if self._state.alive is not None:  # it knows since when too few live
            known.follow(self._state.alive, self._state.now)
            self.is_short |= known.short_since is not None
        known.note_calls([noted[1:] for noted in self._state.noted if noted[0] == group])

    def present(self, group: int) -> int:
        """Return the group's present step; -1: it is not defined."""
        known = self._groups.get(group)
        return -1 if known is None else known.step

    def is_stale(self, group: int, local_step: int) -> bool | None:
        """Return whether a push of this local step counts in no step, whoever else pushes.

        None: the group is not defined.
        """
        known = self._groups.get(group)
        if known is None:
            return None
        first = known.first_step if local_step < 0 else local_step
        return known.step > first or self._state.ended is not None or known.broken is not None

    def init_tokens(self, group: int, count: int) -> list[Action]:
        """Put a group's initial tokens: once, however often a chief that restarts asks.

        Raises:
            ConfigurationError: Too few for the first step.
        """
        return [*self._groups[group].put_initial(count), *self._close_what_is_due()]

    # Pushes.

    def contribute(self, group: int, contribution: Contribution) -> list[Action]:
        """Judge a push by the table above, and close the step if it was the last one missing."""
        known, replica = self._groups[group], contribution.replica
        actions: list[Action] = []
        try:
            if self._state.incarnations.setdefault(replica[0], replica[1]) != replica[1]:
                actions += self._replace_older(replica)
            push = known.judge(contribution, self._final, self._state.ended)
        except PsyncError as exc:
            return [*actions, Refuse(group, replica, contribution.number, exc)]
        if push.answer is not None:  # it is known
            return [push.answer]
        if not known.has_initial:
            actions += known.put_initial(-1)
        if not known.is_due:
            actions += known.take(push)
            return actions + self._close_what_is_due() if self._nobody_comes() else actions
        actions.append(known.close(partial=False, last=push))
        # Only now may a token be taken: those that were there are void.
        return actions if push.answer is not None else actions + known.take(push)

    def forget(self, group: int, replica: Replica, number: int) -> None:
        """Whoever made this request waits no more; what was counted stays counted."""
        known = self._groups.get(group)
        if known is not None:
            known.forget((replica, number))

    def closed(self, group: int, step: int) -> list[Action]:
        """Every ps has applied ``step``, and the global step is raised.

        Raises:
            LocalProtocolError: If it was not being closed.
        """
        actions = self._groups[group].closed(step)
        if self._state.ended is not None:
            actions += self._groups[group].refuse_waiting(TrainingEnded(self._state.ended))
        return actions + self._close_what_is_due()

    def finish(self) -> list[Action]:
        """Nothing is left to do: close the steps in which something was counted.

        However few replicas live: those that pushed may have gone, and nobody goes on without them.
        """
        if self._state.ended is not None:
            return []
        return [
            known.close(partial=not known.is_complete)
            for known in self._groups.values()
            if known.may_end
        ]

    @property
    def is_settled(self) -> bool:
        """Whether all that was counted has been applied, as far as it can be."""
        over = self._state.ended is not None
        return not any(
            known.closing or (known.may_end and not over) for known in self._groups.values()
        )

    def close_failed(self, group: int, error: PsyncError) -> list[Action]:
        """A ps could not apply a step: the group is broken for good."""
        return self._groups[group].failed(error)

    # Who takes part, and what is left to do.

    def members(self, alive: Mapping[str, int], missing: Sequence[str], now: float) -> list[Action]:
        """Take note of who takes part (task → incarnation), and of the names of those who should.

        Targets shrink at once, and grow with the next step for which nothing has counted. Who is
        not named need not be dead: a worker that is out of data takes part no more, and may be
        waiting for its token all the same. Of deaths ``fence`` tells.
        """
        self._state.alive = dict(alive)
        self._state.missing, self._state.now = tuple(missing), now
        actions = [act for task, number in alive.items() for act in self.fence(task, number)]
        self.is_short = False
        for known in self._groups.values():
            known.follow(self._state.alive, now)
            self.is_short |= known.short_since is not None
        return actions + self._close_what_is_due()

    def fence(self, task: str, below: int) -> list[Action]:
        """Incarnations of ``task`` below ``below`` are over: they wait no more."""
        known = self._state.incarnations.get(task)
        if known is None or known >= below:
            return []
        self._state.incarnations[task] = below
        return self._drop((task, known), f"incarnation {known} of {task} is over")

    def schedule(self, queued: bool, in_flight: Sequence[int]) -> list[Action]:
        """Take note of the coordinator's closures.

        Args:
            queued: Whether more may be started: then ``in_flight`` says nothing.
            in_flight: Ids of the closures that workers hold.
        """
        self._state.in_flight = [] if queued else sorted(set(in_flight))
        return self._close_what_is_due()

    def final_below(self, closure: int, kept: Sequence[tuple[int, int]] = ()) -> None:
        """Forget the calls of all closures below ``closure``; as ``Ledger.final_below``."""
        if self._final.update(closure, kept):
            self._state.noted = [
                noted for noted in self._state.noted if not self._final.is_over(noted[1])
            ]
            for known in self._groups.values():
                known.forget_calls(self._final)

    def closing(self) -> list[Close]:
        """Return the steps that are decided, and not applied by every ps."""
        return [known.closing for known in self._groups.values() if known.closing is not None]

    def pending_closures(self) -> list[int]:
        """Return the closures, by first run, that were counted in a step that is not applied."""
        return sorted({first for known in self._groups.values() for first, _ in known.pending()})

    def calls(self) -> list[tuple[int, int, int, bytes]]:
        """Return (group, closure, ordinal, digest) of each call in steps that have been applied."""
        calls = [noted for noted in self._state.noted if noted[0] not in self._groups]
        for number, known in self._groups.items():
            calls += [(number, *call) for call in known.calls()]
        return calls

    def note_calls(self, calls: Sequence[tuple[int, int, int, bytes]], final: Finality) -> None:
        """Take calls for counted that were counted before; no group is defined yet.

        Args:
            calls: (group, closure, ordinal, digest) of each.
            final: Which closures are final.
        """
        self._state.noted, self._final = list(calls), Finality(final.below, final.listed())

    def end(self, reason: str) -> list[Action]:
        """Close the token channels: whoever waits or comes later is told that training has ended.

        A step that is being applied is carried to its end, and those whose pushes count in it are
        told so; one that is not complete is dropped.
        """
        self._state.ended = reason
        error = TrainingEnded(reason)
        return [
            act
            for known in self._groups.values()
            for act in known.refuse_waiting(error, but=known.takers_being_applied())
        ]

    @property
    def waiting(self) -> frozenset[Replica]:
        """Who waits in a group for others: not where a step is being applied, which will end."""
        groups = [known for known in self._groups.values() if known.closing is None]
        return frozenset(replica for known in groups for replica, _ in known.tokens.waiting)

    # Time.

    def next_deadline(self) -> float | None:
        """Return the time at which ``tick`` has something to do, or None."""
        earliest: float | None = None
        for known in self._groups.values():
            if known.short_since is not None and known.tokens.waiting:
                deadline = known.short_since + known.config.patience_s
                earliest = deadline if earliest is None else min(earliest, deadline)
        return earliest

    def tick(self, now: float) -> list[Action]:
        """Tell those who have waited too long for ``min_replicas`` who is missing."""
        actions: list[Action] = []
        for known in self._groups.values():
            since = known.short_since
            if since is not None and now >= since + known.config.patience_s:
                actions += known.refuse_waiting(self._not_enough(known))
        return actions

    def statistics(self, lacks: Callable[[int], list[str]] = lambda _: []) -> dict[str, Any]:
        """Return counters of each group, by its name and number; and what its step ``lacks``."""
        return {
            f"{known.config.name}/{number}": {**known.statistics(), "lacks": lacks(number)}
            for number, known in self._groups.items()
        }

    # Snapshots.

    def snapshot(self) -> dict[str, Any]:
        """Return all of its state as plain data: numbers, texts, lists."""
        return {
            **msgspec.to_builtins(self._state, builtin_types=(bytes,)),
            "final": [self._final.below, self._final.listed()],
            "groups": [[number, known.snapshot()] for number, known in self._groups.items()],
        }

    def restore(self, state: Mapping[str, Any], configs: Mapping[int, SyncConfig]) -> None:
        """Take the state that another one has returned.

        Args:
            state: Of the other one.
            configs: Of its groups.
        """
        self._state = msgspec.convert(state, RuleState)
        self._final = Finality(*state["final"])
        for number, group in state["groups"]:
            self.define(number, configs[number], 0)
            known = self._groups[number]
            known.restore(group)
            self.is_short |= known.short_since is not None

    # Decisions.

    def _close_what_is_due(self) -> list[Action]:
        """Close the steps whose target is reached, and those for which nobody else is to come.

        Nobody else will come if nothing is queued and all closures in flight wait in a group;
        nobody else can if all living replicas wait in one. A group that is being closed will
        let its replicas go on, so nothing is decided for lack of others until it has.
        """
        if self._state.ended is not None:
            return []
        groups = self._groups.values()
        actions: list[Action] = [known.close(partial=False) for known in groups if known.is_due]
        if actions or not self._nobody_comes():
            return actions
        for known in groups:
            if known.short_since is None:
                actions += [known.close(partial=True)] if known.may_end else known.release()
        return actions

    def _nobody_comes(self) -> bool:
        groups = self._groups.values()
        num_waiting = 0
        for known in groups:
            if known.closing is not None:
                return False
            num_waiting += len(known.tokens.waiting)
        if self._state.alive and num_waiting >= len(self._state.alive):
            replicas = {replica for known in groups for replica, _ in known.tokens.waiting}
            if replicas.issuperset(self._state.alive.items()):
                return True
        if self._state.in_flight and num_waiting >= len(self._state.in_flight):
            closures = {closure for known in groups for closure in known.waiting_closures()}
            return closures.issuperset(self._state.in_flight)
        return False

    def _replace_older(self, replica: Replica) -> list[Action]:
        """Drop what an earlier incarnation of the task has left; FencedError if this is one."""
        task, incarnation = replica
        known = self._state.incarnations[task]
        text = f"incarnation {min(known, incarnation)} of {task} has been replaced"
        if incarnation < known:
            raise FencedError(text)
        self._state.incarnations[task] = incarnation
        return self._drop((task, known), text)

    def _drop(self, replica: Replica, text: str) -> list[Action]:
        error = FencedError(text)
        return [act for known in self._groups.values() for act in known.drop(replica, error)]

    def _not_enough(self, known: Group) -> NotEnoughReplicas:
        alive = sorted(self._state.alive or ())
        missing = ", ".join(self._state.missing) or "unknown"
        return NotEnoughReplicas(
            f"{known.config.name}: step {known.step} needs at least {known.config.min_replicas} "
            f"living replicas that have data, and for {known.config.patience_s:g} s there were "
            f"{len(alive)} ({', '.join(alive) or 'none'}); missing: {missing}",
            hint="start the missing workers, or give them data, or lower min_replicas",
        )
