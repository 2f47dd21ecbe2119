"""The rule of synchronous steps on ps 0: which pushes count, when a step closes, who gets a token.

A push arrives here when all its parts are held by ps tasks, or when it is stale. For each the first
line that fits decides:

    the push                                             what becomes of it
    of an incarnation that was replaced                  FencedError
    its replica has acknowledged the answer              Refuse: it came late, nobody waits for it
    same replica, same number, answered                  the same Answer again
    training has ended, or the group is broken           Refuse
    same replica, same number, waiting                   it goes on waiting
    its closure is final, or made the same call before   "duplicate", then a token
    local step below the group's step, see ``Group``     "stale", then a token
    its replica has used all bound tokens of the step    "stale", then a token
    else                                                 it counts, then a token

One staleness decision for a whole push, over all variables and all ps tasks: TensorFlow's
accumulators decide one by one.

A step is closed when its target is reached, or as a partial one when no other worker will or can
come; see ``_close_what_is_due``. Close means that it is decided, and ``StepCloser`` carries it
to all ps tasks; ``closed`` says that they have applied it. In between the group is at the next step
already, and no other Close of it is under way. Pushes with a part on every ps get their tokens with
the Close, as each ps answers when it has applied the step; all others when it is ``closed``, first
in, first out.

Source: TensorFlow's ``SyncReplicasOptimizer``; Chen et al. 2016 for backup replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from psync.cluster import parse_task_name
from psync.errors import (
    FencedError,
    LocalProtocolError,
    NotEnoughReplicas,
    PsyncError,
    TrainingEnded,
    UsageError,
)
from psync.numerics.sums import check_weight
from psync.store.ledger import Ledger
from psync.store.sync_config import SyncConfig
from psync.wire.closure_numbers import call_of, first_of
from psync.wire.messages import Failure
from psync.wire.remote_errors import exception_of, failure_of

Replica: TypeAlias = tuple[str, int]
"""Task name and incarnation."""

Taker: TypeAlias = tuple[Replica, int]
"""Who asks: a replica, and the number of its push."""


class TokenChannel(msgspec.Struct, eq=False):
    """The tokens of each step of a group, and the replicas that wait; all of it is state.

    A token is the number of a step. After each push a replica takes one and waits if there is none.
    Tokens and waiting replicas are first in, first out; the channel has no bound.

    **Free** tokens go to the first that asks, as in TensorFlow: a fast replica may take what was
    meant for a slow one. **Bound** ones are counted instead of queued: each replica may take so
    many of each step, less what it contributed to the step without one of these (``charge``). A new
    step's tokens void those of earlier steps, unless the channel is to keep them.

    With N replicas and R gradients a step, each step publishes max(N, R) tokens. A replica's first
    push needs none, so there are no initial tokens where N ≥ R, and R - N where N < R: no step is
    wasted. ``strict`` binds ⌈R/N⌉ tokens of each step to every replica; ``tensorflow_compat`` puts
    R initial tokens and keeps old ones, as TensorFlow does.

    A push that is counted in a step may get its token when the step is decided (``reserve``): its
    answer leaves with the values of the step. What it does not want any more is free again
    (``give_back``).

    Source: the ``sync_token_q`` of TensorFlow's ``SyncReplicasOptimizer``. Different there: tokens
    are never bound, never void, and a waiting replica is never told that training has ended.

    Args:
        allowance: None: free tokens. Else how many of each step a replica may take.
        keeps_old: Whether a new step leaves older tokens in the channel.
    """

    allowance: int | None = None
    keeps_old: bool = False
    step: int = 0  # of the newest tokens
    free: list[int] = msgspec.field(default_factory=list)
    valid_from: int = 0  # the lowest step of which there may be tokens
    used: dict[Taker, int] = msgspec.field(default_factory=dict)  # bound ones, by replica and step
    waiting: dict[Taker, None] = msgspec.field(default_factory=dict)  # in order of arrival
    reserved: int = 0  # free tokens of the next ``put`` that are taken
    published: int = 0
    taken: int = 0
    void: int = 0

    def put(self, step: int, count: int) -> list[tuple[Taker, int]]:
        """Publish ``count`` tokens of ``step``; return who gets which.

        Bound tokens need no count: every replica gets its allowance.
        """
        if step > self.step:
            self.step = step
            if not self.keeps_old and step > self.valid_from:
                self.void_below(step)
        if self.allowance is None:
            left = max(0, count - self.reserved)
            self.reserved = 0
            self.free.extend([step] * left)
            self.published += left
        else:
            self.used = {key: n for key, n in self.used.items() if key[1] >= step}
        grants: list[tuple[Taker, int]] = []
        for taker in list(self.waiting):
            token = self._token_for(taker[0])
            if token is not None:
                del self.waiting[taker]
                grants.append((taker, token))
            elif self.allowance is None:
                break
        return grants

    def void_below(self, step: int) -> None:
        """Let there be no tokens of earlier steps: none at all, until ``put`` brings newer ones."""
        self.valid_from = step
        while self.free and self.free[0] < step:
            del self.free[0]
            self.void += 1

    def take(self, taker: Taker) -> int | None:
        """Return a token, or None: ``taker`` waits. Whoever waits already keeps its place."""
        token = None if taker in self.waiting else self._token_for(taker[0])
        if token is None:
            self.waiting[taker] = None
        return token

    def reserve(self, takers: Sequence[Taker], step: int) -> None:
        """Let each of ``takers`` have a token of ``step``, which is published later."""
        for taker in takers:
            self.waiting.pop(taker, None)
            if self.allowance is None:
                self.reserved += 1
            else:
                self.used[taker[0], step] = self.used.get((taker[0], step), 0) + 1
        self.published += len(takers)
        self.taken += len(takers)

    def give_back(self, taker: Taker, step: int) -> None:
        """``taker`` does not want its token of ``step``, which is not published so far."""
        if self.allowance is None:
            self.reserved -= 1
        else:
            self.used[taker[0], step] -= 1
        self.published -= 1
        self.taken -= 1

    def charge(self, replica: Replica, step: int) -> None:
        """Count a bound token of ``step`` as used, by who contributed to it without having one.

        Such a replica began, or it has used an older token for values that it pulled since.
        """
        if self.allowance is not None:
            self.used[replica, step] = self.used.get((replica, step), 0) + 1

    def release(self, step: int) -> list[tuple[Taker, int]]:
        """Give everyone who waits a token of ``step`` beyond what was published."""
        grants = [(taker, step) for taker in self.waiting]
        self.waiting.clear()
        self.published += len(grants)
        self.taken += len(grants)
        return grants

    def statistics(self) -> dict[str, int]:
        """Return counters as of now: ``published == taken + void + left``."""
        return {
            "published": self.published, "taken": self.taken, "void": self.void,
            "left": len(self.free),
        }  # fmt: skip

    def _token_for(self, replica: Replica) -> int | None:
        if self.allowance is None:
            if not self.free:
                return None
            token = self.free.pop(0)
        else:
            used = self.used.get((replica, self.step), 0)
            if self.step < self.valid_from or used >= self.allowance:
                return None
            self.used[replica, self.step] = used + 1
            self.published += 1
            token = self.step
        self.taken += 1
        return token


Listed: TypeAlias = list[tuple[int, float]] | None
"""Factors of variables, as a message has them."""


class Contribution(msgspec.Struct, frozen=True):
    """A push whose parts are all here, or which is stale."""

    replica: Replica
    number: int  # of the push, from 1; the replica counts anew in each group
    acked_below: int  # the replica has the answers to all smaller numbers
    call: tuple[int, int] | None  # closure, and ordinal as for ``Ledger.judge``
    variable_set: bytes  # digest of the variables of the push
    local_step: int  # -1: of before the group's first step
    weight: float
    others: list[int]  # ps tasks but 0 that have a part of it


class Answer(msgspec.Struct):
    """Tell the replica what became of its push, and from which step it may go on."""

    group: int
    replica: Replica
    number: int
    outcome: str  # "accepted", "stale" or "duplicate"
    staleness: int  # steps closed since the values were pulled
    token: int
    partial: bool  # whether it was counted in a step that was closed as a partial one
    count: int  # pushes in the step that it was counted in; 0: that is not closed, or there is none


class Refuse(msgspec.Struct, frozen=True):
    """Tell the replica that its push has failed."""

    group: int
    replica: Replica
    number: int
    error: PsyncError


class Close(msgspec.Struct):
    """Let every ps apply ``step``, raise the global step, then call ``closed``.

    ``answers`` leave as soon as this ps has applied it: these pushes have a part on every ps, and
    each of them answers when it has.
    """

    group: int
    step: int
    pushes: list[tuple[str, int, int, float]]  # task, incarnation, number, weight; in order
    places: list[list[int]]  # of each the other ps tasks that have a part of it
    partial: bool
    answers: list[Answer]
    is_measured: bool = False  # the factors are known, where there are any
    scales: Listed = None
    ratios: Listed = None


Action: TypeAlias = Answer | Refuse | Close


class Push(msgspec.Struct, eq=False):
    """What is known of one push, until its replica has the answer."""

    contribution: Contribution
    outcome: str
    staleness: int
    partial: bool = False
    count: int = 0
    answer: Answer | None = None


class Known(msgspec.Struct, eq=False):
    """What a group knows of a replica."""

    acked_below: int = 0  # it has the answers to all smaller numbers
    pushes: dict[int, Push] = msgspec.field(default_factory=dict)  # the others, by number
    token: int = -1  # that it has not used so far; -1: none


class GroupState(msgspec.Struct, kw_only=True, eq=False):
    """What a backup has of a group, too."""

    step: int
    first_step: int  # values of before it (local step -1) count as of this step
    tokens: TokenChannel = msgspec.field(default_factory=TokenChannel)
    target: int = 0  # pushes that the present step takes
    next_target: int = 0
    counted: list[Push] = msgspec.field(default_factory=list)  # in the present step
    being_applied: list[Push] = msgspec.field(default_factory=list)  # in that which is closed
    closing: Close | None = None  # is being applied
    failure: Failure | None = None  # see ``broken``
    short_since: float | None = None  # since when fewer live than ``min_replicas``
    has_initial: bool = False  # initial tokens were put
    replicas: dict[Replica, Known] = msgspec.field(default_factory=dict)
    outcomes: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)  # pushes by task
    staleness: dict[int, int] = msgspec.field(default_factory=Counter)
    num_steps: int = 0
    num_partial: int = 0


class Group(GroupState, kw_only=True, eq=False):
    """One group: its step, counted pushes, replicas and tokens. It begins at the global step.

    ``SyncSteps`` looks over all groups and decides when to close a step; what follows in one:

        for each push   ``judge``; then ``take``
        for each step   ``close``; then ``closed`` once every ps has applied it, or ``failed``

    Args:
        number: Of the group.
        config: What its optimizer said.
        others: How many ps tasks there are but ps 0.
        ledger: Of ps 0, which knows the calls that count.

    Attributes:
        broken: Why a step could not be applied: none will be.
    """

    number: int
    config: SyncConfig
    others: int
    ledger: Ledger
    broken: PsyncError | None = None
    per_step: int = 0  # tokens

    def __post_init__(self) -> None:
        config = self.config
        self.per_step = config.tokens_per_step
        self.target = self.next_target = config.replicas_to_aggregate
        self.tokens = TokenChannel(
            config.allowance if config.strict else None, config.tensorflow_compat
        )
        self.tokens.put(self.step, 0)

    # Pushes.

    def judge(self, contribution: Contribution, ended: str | None = None) -> Push:
        """Decide what becomes of a push, and count it if it counts; or return what is known of it.

        Args:
            contribution: The push; those whose answers its replica has acknowledged are forgotten.
            ended: Why training has ended.

        Raises:
            UsageError: Its answer was acknowledged: a token would be lost. Or another run of its
                closure pushed other variables, or its replica makes more pushes at once than it
                may contribute to a step.
            ValueMismatchError: The weight is out of range.
            TrainingEnded: It has, and the push does not count in the step that is being applied.
            PsyncError: The group is broken.
        """
        replica, number = contribution.replica, contribution.number
        known = self.replicas.get(replica)
        if known is None:
            known = self.replicas[replica] = Known()
        if known.acked_below < contribution.acked_below:
            known.acked_below = contribution.acked_below
            for acked in list(known.pushes):
                if acked < known.acked_below:
                    del known.pushes[acked]
                    self.tokens.waiting.pop((replica, acked), None)  # it may be cancelled there
        if number < known.acked_below:
            raise UsageError(
                f"{self.config.name}: {replica[0]} sent push {number} again, whose answer it has "
                "acknowledged"
            )
        push = known.pushes.get(number)
        if push is not None and push.answer is not None:
            return push
        if ended is not None and (push is None or not self.applies(push)):
            raise TrainingEnded(ended)
        if self.broken is not None:
            raise self.broken
        if push is not None:
            return push
        if contribution.weight != 1.0:
            check_weight(contribution.weight)
        local_step = contribution.local_step
        # Steps that were closed since these values were the newest.
        staleness = max(0, self.step - (self.first_step if local_step < 0 else local_step))
        counts = self.outcomes.setdefault(replica[0], {"accepted": 0, "stale": 0, "duplicate": 0})
        call, variables = contribution.call, (self.number, contribution.variable_set)
        of = f"{self.config.name}: "
        if call is not None and not self.ledger.is_first(call, variables, (), of):
            push = Push(contribution, "duplicate", staleness)
        elif staleness or (self.config.strict and self._has_had_its_share(contribution)):
            push = Push(contribution, "stale", staleness)
        else:
            push = Push(contribution, "accepted", 0)
            self.counted.append(push)
            if call is not None:
                self.ledger.count(call, variables)
        counts[push.outcome] += 1
        self.staleness[staleness] += 1
        known.pushes[number] = push
        if push.outcome == "accepted" and known.token != self.step:
            self.tokens.charge(replica, self.step)
        known.token = -1
        return push

    def take(self, push: Push) -> list[Action]:
        """Let the push's replica have a token, or wait for one."""
        taker = (push.contribution.replica, push.contribution.number)
        token = self.tokens.take(taker)
        return [] if token is None else self._answers([(taker, token)])

    def forget(self, taker: Taker) -> None:
        """Nobody waits for this push: nor does it take the token that it has for its step."""
        self.tokens.waiting.pop(taker, None)
        for push in self.being_applied:
            answer = push.answer
            if answer and answer.count and (answer.replica, answer.number) == taker:
                self.tokens.give_back(taker, answer.token)
                push.answer = None

    def fence(self, task: str, below: int) -> list[Action]:
        """Lower incarnations of a task wait no more. What was counted stays counted."""
        refused: list[Action] = []
        for replica in [each for each in self.replicas if each[0] == task and each[1] < below]:
            error = FencedError(f"incarnation {replica[1]} of {task} has been replaced")
            waiting = [taker for taker in self.tokens.waiting if taker[0] == replica]
            refused += [Refuse(self.number, *taker, error) for taker in waiting]
            for number in self.replicas.pop(replica).pushes:
                self.forget((replica, number))
        return refused

    def waiting_closures(self) -> set[int]:
        """Return the closures whose replicas wait for a token."""
        waiting = self.tokens.waiting
        pushes = [self.replicas[replica].pushes[number] for replica, number in waiting]
        calls = [push.contribution.call for push in pushes]
        return {call[0] for call in calls if call is not None}

    def pending(self) -> set[tuple[int, int]]:
        """Return (closure, ordinal) of each call in steps that have not been applied."""
        calls = [push.contribution.call for push in (*self.being_applied, *self.counted)]
        return {(first_of(call[0]), call_of(call[1])) for call in calls if call is not None}

    # Snapshots.

    def snapshot(self) -> Any:
        """Return its state as plain data."""
        state = {name: getattr(self, name) for name in GroupState.__struct_fields__}
        return msgspec.to_builtins(state, builtin_types=(bytes,))

    def restore(self, state: Any) -> None:
        """Take the state that another one, of the same number and configuration, has returned."""
        given = msgspec.convert(state, GroupState)
        given.staleness = Counter(given.staleness)
        for name in GroupState.__struct_fields__:
            setattr(self, name, getattr(given, name))
        if self.failure is not None:
            self.broken = exception_of(self.failure, "/job:ps/task:0")
        for pushes in (self.counted, self.being_applied):  # the same object, wherever it is
            for at, push in enumerate(pushes):
                made = push.contribution
                if made.replica in self.replicas:
                    pushes[at] = self.replicas[made.replica].pushes.get(made.number, push)
                # The ledger's snapshot has those that are applied, and none of what is final.
                if made.call is not None and not self.ledger.final.is_over(first_of(made.call[0])):
                    self.ledger.count(made.call, (self.number, made.variable_set))

    # Steps.

    @property
    def is_complete(self) -> bool:
        """Whether the present step has what it needs."""
        return len(self.counted) >= self.target

    @property
    def may_end(self) -> bool:
        """Whether there is a step that may be closed when nothing is left to do."""
        return bool(self.counted and self.closing is None and self.broken is None)

    @property
    def is_due(self) -> bool:
        """Whether the present step has what it needs, and may be closed now."""
        return (
            len(self.counted) >= self.target
            and self.closing is None
            and self.broken is None
            and self.short_since is None
        )

    def follow(self, alive: Mapping[str, int], now: float) -> None:
        """Let the target follow the living replicas, and note if they are too few.

        Once a push has counted it does not grow: those that come may have nothing for this step.
        """
        target = self.next_target = self._target_for(alive)
        self.target = min(self.target, target) if self.counted else target
        if len(alive) >= self.config.min_replicas:
            self.short_since = None
        elif self.short_since is None:
            self.short_since = now

    def close(self, *, partial: bool, last: Push | None = None) -> Close:
        """Decide that the present step, which ``may_end``, is closed with what was counted.

        Args:
            partial: Whether it is less than what it needs.
            last: The push that makes it complete; it has asked for no token so far.
        """
        assert self.may_end, f"{self.config.name}: there is nothing to close at step {self.step}"
        pushes, self.counted = self.counted, []
        self.being_applied = pushes
        if self.config.deterministic:
            pushes.sort(key=lambda push: (parse_task_name(push.contribution.replica[0]),
                                          push.contribution.number))  # fmt: skip
        waiting, takers = self.tokens.waiting, list[Taker]()
        named, places = list[tuple[str, int, int, float]](), list[list[int]]()
        for push in pushes:
            push.partial, push.count = partial, len(pushes)
            made = push.contribution
            takers.append((made.replica, made.number))
            named.append((*made.replica, made.number, made.weight))
            places.append(made.others)
        self.step += 1
        answers: list[Answer] = []
        if not self.config.tensorflow_compat:
            self.tokens.void_below(self.step)
            # Who waits already, and has pushed too late for this step, comes first.
            room = self.per_step - len(waiting.keys() - takers)
            reserved: list[Taker] = []
            for push, taker, others in zip(pushes, takers, places, strict=True):
                waits = push is last or taker in waiting
                if waits and len(others) == self.others and len(reserved) < room:
                    reserved.append(taker)
                    answers.append(self._answer(push, self.step, push.count))
            self.tokens.reserve(reserved, self.step)
        self.closing = Close(self.number, self.step - 1, named, places, partial, answers)
        self.num_steps += 1
        self.num_partial += partial
        return self.closing

    def closed(self, step: int) -> list[Action]:
        """Publish the tokens of the step that has begun.

        Raises:
            LocalProtocolError: If ``step`` was not being closed.
        """
        if self.closing is None or self.closing.step != step:
            expected = "none" if self.closing is None else f"step {self.closing.step}"
            raise LocalProtocolError(
                f"{self.config.name}: step {step} is not being closed, but {expected}"
            )
        self.closing = None
        self.being_applied = []
        self.target = self.next_target
        return self._answers(self.tokens.put(self.step, self.per_step))

    def failed(self, error: PsyncError) -> list[Action]:
        """The step that is being closed cannot be applied: the group is broken for good."""
        self.broken, self.failure, self.closing = error, failure_of(error), None
        refused: list[Action] = []
        for push in self.being_applied:
            if push.answer is not None:  # who asks again hears the error
                push.answer = None
                taker = push.contribution.replica, push.contribution.number
                refused.append(Refuse(self.number, *taker, error))
        return refused + self.refuse_waiting(error)

    def put_initial(self, count: int) -> list[Action]:
        """Put the initial tokens, once; -1: as many as is the default.

        Raises:
            ConfigurationError: Too few for the first step.
        """
        if self.has_initial:
            return []
        number = self.config.initial_tokens(count)
        self.has_initial = True
        return self._answers(self.tokens.put(self.first_step, number))

    def release(self) -> list[Action]:
        """Give those who wait tokens of the present step: nothing else will make it go on."""
        return self._answers(self.tokens.release(self.step))

    def takers_being_applied(self) -> list[Taker]:
        """Return the pushes that count in the step that is being applied."""
        made = [push.contribution for push in self.being_applied]
        return [(contribution.replica, contribution.number) for contribution in made]

    def applies(self, push: Push) -> bool:
        """Whether a push counts in the step that is being applied."""
        return any(push is each for each in self.being_applied)

    def refuse_waiting(self, error: PsyncError, *, but: Sequence[Taker] = ()) -> list[Action]:
        """Nobody waits any more, but for some: the others are told why."""
        refused = [taker for taker in self.tokens.waiting if taker not in but]
        for taker in refused:
            del self.tokens.waiting[taker]
        return [Refuse(self.number, *taker, error) for taker in refused]

    def statistics(self) -> dict[str, Any]:
        """Return counters as plain data."""
        return {
            "step": self.step,
            "target": self.target,
            "counted": len(self.counted),
            "steps": self.num_steps,
            "partial_steps": self.num_partial,
            "waiting": len(self.tokens.waiting),
            "waits": sorted({task for (task, _), _ in self.tokens.waiting}),
            "tokens": self.tokens.statistics(),
            "staleness": {str(key): count for key, count in sorted(self.staleness.items())},
            "replicas": {task: dict(counts) for task, counts in self.outcomes.items()},
        }

    def _has_had_its_share(self, contribution: Contribution) -> bool:
        """Whether the replica has contributed to the step all that its bound tokens allow.

        It has not waited for the next step: its earlier push was cancelled, and this one came too
        early to count. If it still waits, the program does not wait for it.
        """
        replica = contribution.replica
        share = [push.contribution.replica for push in self.counted].count(replica)
        if share < self.config.allowance:
            return False
        if any(owner == replica for owner, _ in self.tokens.waiting):
            raise UsageError(
                f"{self.config.name}: {replica[0]} has contributed {share} times "
                f"to step {self.step}, the maximum with bound tokens",
                hint="await each apply_gradients before the next pull and push",
            )
        return True

    def _target_for(self, alive: Mapping[str, int]) -> int:
        most = max(self.config.min_replicas, len(alive) * self.config.allowance)
        return min(self.config.replicas_to_aggregate, most)

    def _answers(self, grants: list[tuple[Taker, int]]) -> list[Action]:
        answers: list[Action] = []
        for (replica, number), token in grants:
            push = self.replicas[replica].pushes[number]
            # Who goes on while its step is applied is told of no step: that may fail yet.
            count = 0 if self.closing is not None and self.applies(push) else push.count
            answers.append(self._answer(push, token, count))
        return answers

    def _answer(self, push: Push, token: int, count: int) -> Answer:
        replica, number = push.contribution.replica, push.contribution.number
        push.answer = Answer(
            self.number, replica, number, push.outcome, push.staleness, token, push.partial, count
        )
        self.replicas[replica].token = token
        return push.answer


class _Groups(dict[int, Group]):
    """Those that are defined, by their numbers."""

    def __missing__(self, group: int) -> Group:
        raise LocalProtocolError(f"synchronous group {group} is not defined")


class RuleState(msgspec.Struct, eq=False):
    """What a backup has of the rule, too, beside its groups."""

    alive: dict[str, int] | None = None  # None: nobody has said so far
    missing: tuple[str, ...] = ()
    now: float = 0.0  # when this was said
    in_flight: list[int] = msgspec.field(default_factory=list)  # closures; none: more may start
    ended: str | None = None  # why


class SyncSteps:
    """All synchronous groups of one cluster. Single owner, no clock; never blocks.

    Args:
        ledger: Of ps 0, which knows the calls that count.
        others: How many ps tasks there are but ps 0.

    Attributes:
        groups: By number; LocalProtocolError: one is not defined.
        is_short: Whether fewer replicas live than some group needs: ``next_deadline`` may be one.
    """

    def __init__(self, ledger: Ledger, others: int = 0) -> None:
        self.ledger = ledger
        self._others = others
        self.groups = _Groups()
        self.is_short = False
        self._state = RuleState()

    # Groups.

    def define(self, group: int, config: SyncConfig, initial_step: int) -> None:
        """Make a group known; the same again changes nothing.

        Args:
            group: Its number.
            config: What its optimizer said; no other group has its name.
            initial_step: The value of the global step.
        """
        if group in self.groups:
            return
        known = self.groups[group] = Group(
            number=group, config=config, others=self._others, ledger=self.ledger,
            step=initial_step, first_step=initial_step,
        )  # fmt: skip
        if self._state.alive is not None:  # it knows since when too few live
            known.follow(self._state.alive, self._state.now)
            self.is_short |= known.short_since is not None

    def present(self, group: int) -> int:
        """Return the group's present step; -1: it is not defined."""
        known = self.groups.get(group)
        return -1 if known is None else known.step

    def is_stale(self, group: int, local_step: int) -> bool | None:
        """Return whether a push of this local step counts in no step, whoever else pushes.

        None: the group is not defined.
        """
        known = self.groups.get(group)
        if known is None:
            return None
        first = known.first_step if local_step < 0 else local_step
        return known.step > first or self._state.ended is not None or known.broken is not None

    def init_tokens(self, group: int, count: int) -> list[Action]:
        """Put a group's initial tokens: once, however often a chief that restarts asks.

        Raises:
            ConfigurationError: Too few for the first step.
        """
        return [*self.groups[group].put_initial(count), *self._close_what_is_due()]

    # Pushes.

    def contribute(self, group: int, contribution: Contribution) -> list[Action]:
        """Judge a push by the table above, and close the step if it was the last one missing.

        Raises:
            FencedError: Its replica has been replaced.
        """
        known, replica = self.groups[group], contribution.replica
        self.ledger.check_incarnation(*replica)
        actions = [] if replica in known.replicas else self.fence(*replica)
        try:
            push = known.judge(contribution, self._state.ended)
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
        known = self.groups.get(group)
        if known is not None:
            known.forget((replica, number))

    def closed(self, group: int, step: int) -> list[Action]:
        """Every ps has applied ``step``, and the global step is raised.

        Raises:
            LocalProtocolError: If it was not being closed.
        """
        actions = self.groups[group].closed(step)
        if self._state.ended is not None:
            actions += self.groups[group].refuse_waiting(TrainingEnded(self._state.ended))
        return actions + self._close_what_is_due()

    def finish(self) -> list[Action]:
        """Nothing is left to do: close the steps in which something was counted.

        However few replicas live: those that pushed may have gone, and nobody goes on without them.
        """
        if self._state.ended is not None:
            return []
        return [
            known.close(partial=not known.is_complete)
            for known in self.groups.values()
            if known.may_end
        ]

    @property
    def is_settled(self) -> bool:
        """Whether all that was counted has been applied, as far as it can be."""
        over = self._state.ended is not None
        return not any(
            known.closing or (known.may_end and not over) for known in self.groups.values()
        )

    def close_failed(self, group: int, error: PsyncError) -> list[Action]:
        """A ps could not apply a step: the group is broken for good."""
        return self.groups[group].failed(error)

    # Who takes part, and what is left to do.

    def members(self, alive: Mapping[str, int], missing: Sequence[str], now: float) -> list[Action]:
        """Take note of who takes part (task → incarnation), and of the names of those who should.

        Targets shrink at once, and grow with the next step for which nothing has counted. Who is
        not named need not be dead: a worker that is out of data takes part no more, and may be
        waiting for its token all the same. Of deaths ``fence`` tells.
        """
        before, self._state.alive = self._state.alive or {}, dict(alive)
        self._state.missing, self._state.now = tuple(missing), now
        begun = [replica for replica in alive.items() if before.get(replica[0]) != replica[1]]
        actions = [act for replica in begun for act in self.fence(*replica)]
        self.is_short = False
        for known in self.groups.values():
            known.follow(self._state.alive, now)
            self.is_short |= known.short_since is not None
        return actions + self._close_what_is_due()

    def fence(self, task: str, below: int) -> list[Action]:
        """Incarnations of ``task`` below ``below`` are over: they wait no more."""
        self.ledger.fence(task, below)
        return [act for known in self.groups.values() for act in known.fence(task, below)]

    def schedule(self, queued: bool, in_flight: Sequence[int]) -> list[Action]:
        """Take note of the coordinator's closures.

        Args:
            queued: Whether more may be started: then ``in_flight`` says nothing.
            in_flight: Ids of the closures that workers hold.
        """
        self._state.in_flight = [] if queued else sorted(set(in_flight))
        return self._close_what_is_due()

    def closing(self) -> list[Close]:
        """Return the steps that are decided, and not applied by every ps."""
        return [known.closing for known in self.groups.values() if known.closing is not None]

    def pending(self) -> set[tuple[int, int]]:
        """Return (closure, ordinal) of each call that counts in a step that is not applied."""
        return {call for known in self.groups.values() for call in known.pending()}

    def end(self, reason: str) -> list[Action]:
        """Close the token channels: whoever waits or comes later is told that training has ended.

        A step that is being applied is carried to its end, and those whose pushes count in it are
        told so; one that is not complete is dropped.
        """
        self._state.ended = reason
        error = TrainingEnded(reason)
        return [
            act
            for known in self.groups.values()
            for act in known.refuse_waiting(error, but=known.takers_being_applied())
        ]

    @property
    def waiting(self) -> frozenset[Replica]:
        """Who waits in a group for others: not where a step is being applied, which will end."""
        groups = [known for known in self.groups.values() if known.closing is None]
        return frozenset(replica for known in groups for replica, _ in known.tokens.waiting)

    # Time.

    def next_deadline(self) -> float | None:
        """Return the time at which ``tick`` has something to do, or None."""
        earliest: float | None = None
        for known in self.groups.values():
            if known.short_since is not None and known.tokens.waiting:
                deadline = known.short_since + known.config.patience_s
                earliest = deadline if earliest is None else min(earliest, deadline)
        return earliest

    def tick(self, now: float) -> list[Action]:
        """Tell those who have waited too long for ``min_replicas`` who is missing."""
        actions: list[Action] = []
        for known in self.groups.values():
            since = known.short_since
            if since is not None and now >= since + known.config.patience_s:
                actions += known.refuse_waiting(self._not_enough(known))
        return actions

    def statistics(self, lacks: Callable[[int], list[str]] = lambda _: []) -> dict[str, Any]:
        """Return counters of each group, by its name; and what its step ``lacks``."""
        return {
            known.config.name: {**known.statistics(), "lacks": lacks(number)}
            for number, known in self.groups.items()
        }

    # Snapshots.

    def snapshot(self) -> dict[str, Any]:
        """Return all of its state as plain data: numbers, texts, lists."""
        return {
            **msgspec.to_builtins(self._state, builtin_types=(bytes,)),
            "groups": [[number, known.snapshot()] for number, known in self.groups.items()],
        }

    def restore(self, state: Mapping[str, Any], configs: Mapping[int, SyncConfig]) -> None:
        """Take the state that another one has returned.

        Args:
            state: Of the other one.
            configs: Of its groups.
        """
        self._state = msgspec.convert(state, RuleState)
        for number, group in state["groups"]:
            self.define(number, configs[number], 0)
            known = self.groups[number]
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
        groups = self.groups.values()
        actions: list[Action] = [known.close(partial=False) for known in groups if known.is_due]
        if actions or not self._nobody_comes():
            return actions
        for known in groups:
            if known.short_since is None:
                actions += [known.close(partial=True)] if known.may_end else known.release()
        return actions

    def _nobody_comes(self) -> bool:
        groups = self.groups.values()
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

    def _not_enough(self, known: Group) -> NotEnoughReplicas:
        alive = sorted(self._state.alive or ())
        missing = ", ".join(self._state.missing) or "unknown"
        return NotEnoughReplicas(
            f"{known.config.name}: step {known.step} needs at least {known.config.min_replicas} "
            f"living replicas that have data, and for {known.config.patience_s:g} s there were "
            f"{len(alive)} ({', '.join(alive) or 'none'}); missing: {missing}",
            hint="start the missing workers, or give them data, or lower min_replicas",
        )
