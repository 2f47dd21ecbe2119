"""One synchronous group: its step, counted pushes, replicas and tokens.

``SyncSteps`` looks over all groups and decides when to close a step; this is what follows in one:

    for each push   ``judge``; then ``take``
    for each step   ``close``; then ``closed`` once every ps has applied it, or ``failed``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from psync.cluster import parse_task_name
from psync.errors import LocalProtocolError, PsyncError, TrainingEnded, UsageError
from psync.numerics.sums import check_weight
from psync.store.ledger import same_in_each_run
from psync.store.sync_config import SyncConfig
from psync.sync.pushes import Action, Answer, Close, Contribution, Push, Refuse
from psync.sync.tokens import Replica, Taker, TokenChannel
from psync.wire.closure_numbers import FIRST, Finality, first_of
from psync.wire.messages import Failure
from psync.wire.remote_errors import exception_of, failure_of


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
    shares: dict[Replica, int] = msgspec.field(default_factory=dict)  # of ``counted``
    pushes: dict[Replica, dict[int, Push]] = msgspec.field(default_factory=dict)
    """Those that are not acknowledged."""
    acked_below: dict[Replica, int] = msgspec.field(default_factory=dict)
    """It has the answers to all smaller numbers."""
    tokens_held: dict[Replica, int] = msgspec.field(default_factory=dict)  # not used yet
    counted_calls: dict[int, dict[int, bytes]] = msgspec.field(default_factory=dict)
    """Closure → ordinal → digest."""
    outcomes: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)  # pushes by task
    staleness: dict[int, int] = msgspec.field(default_factory=Counter)
    num_steps: int = 0
    num_partial: int = 0


class Group(GroupState, kw_only=True, eq=False):
    """One group. It begins at the value of the global step.

    Args:
        number: Of the group.
        config: What its optimizer said.
        others: How many ps tasks there are but ps 0.

    Attributes:
        broken: Why a step could not be applied: none will be.
    """

    number: int
    config: SyncConfig
    others: int
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

    def judge(self, contribution: Contribution, final: Finality, ended: str | None = None) -> Push:
        """Decide what becomes of a push, and count it if it counts; or return what is known of it.

        Args:
            contribution: The push; those whose answers its replica has acknowledged are forgotten.
            final: Which closures are final.
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
        pushes = self.pushes.setdefault(replica, {})
        acked_below = self.acked_below.setdefault(replica, 0)
        if acked_below < contribution.acked_below:
            acked_below = self.acked_below[replica] = contribution.acked_below
            for acked in list(pushes):
                if acked < acked_below:
                    del pushes[acked]
                    self.tokens.waiting.pop((replica, acked), None)  # it may be cancelled there
        if number < acked_below:
            raise UsageError(
                f"{self.config.name}: {replica[0]} sent push {number} again, whose answer it has "
                "acknowledged"
            )
        push = pushes.get(number)
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
        if self._was_counted(contribution, final):
            push = Push(contribution, "duplicate", staleness)
        elif staleness or (self.config.strict and self._has_had_its_share(contribution)):
            push = Push(contribution, "stale", staleness)
        else:
            push = Push(contribution, "accepted", 0)
            self.counted.append(push)
            self.shares[replica] = self.shares.get(replica, 0) + 1
            if contribution.closure is not None:
                calls = self.counted_calls.setdefault(contribution.closure & FIRST, {})
                calls[contribution.ordinal] = contribution.variable_set
        counts[push.outcome] += 1
        self.staleness[staleness] += 1
        pushes[number] = push
        token = self.tokens_held.pop(replica, None)
        if push.outcome == "accepted" and token != self.step:
            self.tokens.charge(replica, self.step)
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

    def drop(self, replica: Replica, error: PsyncError) -> list[Action]:
        """The replica is gone: it waits no more. What was counted stays counted."""
        waiting = [number for owner, number in self.tokens.waiting if owner == replica]
        for number in self.pushes.get(replica, ()):
            self.forget((replica, number))
        self.pushes.pop(replica, None)
        self.acked_below.pop(replica, None)
        self.tokens_held.pop(replica, None)
        return [Refuse(self.number, replica, number, error) for number in waiting]

    def forget_calls(self, final: Finality) -> None:
        """Forget the calls of closures of which no run will come any more."""
        for first in [first for first in self.counted_calls if final.is_over(first)]:
            del self.counted_calls[first]

    def waiting_closures(self) -> set[int | None]:
        """Return the closures whose replicas wait for a token."""
        return {
            self.pushes[replica][number].contribution.closure
            for replica, number in self.tokens.waiting
        }

    def pending(self) -> set[tuple[int, int]]:
        """Return (closure, ordinal) of each call in steps that have not been applied."""
        pushes = [push.contribution for push in (*self.being_applied, *self.counted)]
        return {
            (first_of(push.closure), push.ordinal) for push in pushes if push.closure is not None
        }

    def calls(self) -> list[tuple[int, int, bytes]]:
        """Return (closure, ordinal, digest) of each call in the steps that have been applied."""
        pending = self.pending()
        return [
            (closure, ordinal, digest)
            for closure, by_ordinal in self.counted_calls.items()
            for ordinal, digest in by_ordinal.items()
            if (closure, ordinal) not in pending
        ]

    def note_calls(self, calls: Iterable[tuple[int, int, bytes]]) -> None:
        """Take calls for counted that were counted before this group was begun anew."""
        for closure, ordinal, digest in calls:
            self.counted_calls.setdefault(closure, {})[ordinal] = digest

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
            pushes[:] = [
                self.pushes.get(made.replica, {}).get(made.number, push)
                for push in pushes
                for made in [push.contribution]
            ]

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
        can_close = self.counted and self.closing is None and self.broken is None
        assert can_close, f"{self.config.name}: there is nothing to close at step {self.step}"
        pushes, self.counted = self.counted, []
        self.being_applied = pushes
        self.shares.clear()
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
        refused = self.tokens.close(but)
        return [Refuse(self.number, replica, number, error) for replica, number in refused]

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

    def _was_counted(self, contribution: Contribution, final: Finality) -> bool:
        closure = contribution.closure
        if closure is None:
            return False
        if final.is_final(closure):
            return True
        digest = self.counted_calls.get(closure & FIRST, {}).get(contribution.ordinal)
        if digest is not None and digest != contribution.variable_set:
            raise UsageError(
                f"{self.config.name}: closure {first_of(closure)}, call {contribution.ordinal}, "
                "pushes other variables than in its first run",
                hint=same_in_each_run(closure),
            )
        return digest is not None

    def _has_had_its_share(self, contribution: Contribution) -> bool:
        """Whether the replica has contributed to the step all that its bound tokens allow.

        It has not waited for the next step: its earlier push was cancelled, and this one came too
        early to count. If it still waits, the program does not wait for it.
        """
        replica = contribution.replica
        if self.shares.get(replica, 0) < self.config.allowance:
            return False
        if any(owner == replica for owner, _ in self.tokens.waiting):
            raise UsageError(
                f"{self.config.name}: {replica[0]} has contributed {self.shares[replica]} times "
                f"to step {self.step}, the maximum with bound tokens",
                hint="await each apply_gradients before the next pull and push",
            )
        return True

    def _target_for(self, alive: Mapping[str, int] | None) -> int:
        needed = self.config.replicas_to_aggregate
        if alive is None:
            return needed
        return min(needed, max(self.config.min_replicas, len(alive) * self.config.allowance))

    def _answers(self, grants: list[tuple[Taker, int]]) -> list[Action]:
        answers: list[Action] = []
        for (replica, number), token in grants:
            push = self.pushes[replica][number]
            # Who goes on while its step is applied is told of no step: that may fail yet.
            count = 0 if self.closing is not None and self.applies(push) else push.count
            answers.append(self._answer(push, token, count))
        return answers

    def _answer(self, push: Push, token: int, count: int) -> Answer:
        replica, number = push.contribution.replica, push.contribution.number
        push.answer = Answer(
            self.number, replica, number, push.outcome, push.staleness, token, push.partial, count
        )
        self.tokens_held[replica] = token
        return push.answer
