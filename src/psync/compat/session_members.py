"""Members of training sessions without a coordinator: the rule on ps 0.

Every worker runs its own loop, as in TensorFlow's between-graph replication. The target of a
synchronous step follows the living workers, so ps 0 keeps the list of them. Its inputs are the
requests of tasks, their connections and the time; it returns what follows.

    chief    attaches the ps tasks → declares → (open: the others enter) → ends training
    worker   asks ─────────────────────────────→ enters → leaves, or is lost

**Incarnations.** A worker does not know the chief's, below which the ps tasks serve no task. So it
gets its own when it enters: above the chief's and above all that its task has had before.
A worker is a replica from the moment at which it enters, before its connections under the new
incarnation are there: all that wait when training begins take part in its first step.

**Losses.** A replica without a connection for ``GRACE_S`` is lost: it is fenced on every ps, and
steps go on without it. Started again, it enters again. Without the chief training ends; and also
when no replica is left, at once if all have left, after ``DESERTED_S`` if one was lost. A worker
that asks to enter after a failure, while the chief is still there, gets that failure; once that
chief has gone, it waits for the next one.

**Failures.** A replica that leaves by an error of the program ends training, also after the last
step: the chief, which leaves last, raises that error.

Source: TensorFlow's between-graph replication; there a worker that dies leaves all others waiting.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from psync.errors import FencedError, PsyncError
from psync.wire.codec import Message
from psync.wire.messages import Done, SessionEntered, TrainingOver

GRACE_S = 5.0
"""How long a replica or the chief may be without a connection to ps 0."""

DESERTED_S = 60.0
"""How long a lost replica may take to come back when there is no other."""

Waiter: TypeAlias = Hashable
"""Whoever waits for an answer. Opaque."""

# --- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer whoever waits: SessionEntered, Done, TrainingOver, or the error of a refusal."""

    waiter: Waiter
    answer: Message | PsyncError


@dataclass(frozen=True, slots=True)
class SetMembers:
    """Tell the synchronous groups who lives (task → incarnation), and who was lost."""

    alive: dict[str, int]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FenceTask:
    """Let every ps refuse incarnations of the task below this one."""

    task: str
    below: int


@dataclass(frozen=True, slots=True)
class CloseTokens:
    """Training has ended: let nobody wait for a token any more."""

    reason: str


Action: TypeAlias = Answer | SetMembers | FenceTask | CloseTokens

# --- the rule --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Task:
    """A replica, or the chief."""

    incarnation: int
    lost_at: float | None  # time at which it is lost unless it connects; None: it is connected

    def is_lost(self, now: float) -> bool:
        return self.lost_at is not None and now >= self.lost_at


class SessionMembers:
    """The replicas of one cluster without a coordinator. Single owner, no clock; never blocks."""

    def __init__(self) -> None:
        self._coordinator = 0  # incarnation of the chief that the ps tasks serve; 0: none yet
        self._chiefs: set[int] = set()  # incarnations of the chiefs that have a connection
        self._given: dict[str, int] = {}  # highest incarnation that each task was given
        # Workers that want to take part: their last request, and what they were started under.
        self._asking: dict[str, tuple[Waiter, int]] = {}
        self._reset()

    def _reset(self) -> None:
        self._members: dict[str, _Task] = {}  # replicas, by task; the chief, too, if it trains
        self._missing: dict[str, None] = {}  # tasks that were lost and are not back, in order
        self._left: set[str] = set()  # that are not back
        self._chief_name = ""
        self._chief: _Task | None = None  # None until it has declared
        self._trains = False  # whether the chief is a replica
        self._num_workers = 0  # how many the chief waits for
        self._opening: Waiter | None = None  # the chief, until it may begin
        self._open = False
        self._over: TrainingOver | None = None
        self._watching: dict[Waiter, None] = {}  # who waits for the end of training
        self._ending: Waiter | None = None  # the chief, until all others have left
        self._deserted_at: float | None = None  # time at which training ends for want of replicas

    # The chief.

    def attached(self, coordinator: int) -> list[Action]:
        """A chief has attached the ps tasks. A new one: whatever was before is over."""
        if coordinator <= self._coordinator:
            return []
        self._coordinator = coordinator
        reason = "a new chief has attached the ps tasks"
        over = TrainingOver(reason, True, None)
        actions: list[Action] = [Answer(waiter, over) for waiter in self._watching]
        actions += _refused(reason, self._opening, self._ending)
        self._reset()
        return actions

    def declared(
        self, waiter: Waiter, chief: str, trains: bool, num_workers: int, now: float
    ) -> list[Action]:
        """The variables are there. Training begins when so many workers have asked to take part.

        Args:
            waiter: Gets the answer then. A repetition takes the place of the first.
            chief: Name of the chief.
            trains: Whether it is a replica.
            num_workers: How many others it waits for.
            now: Time in seconds.
        """
        if self._open:
            return [Answer(waiter, Done())]
        actions = _replaced(self._opening, chief)
        self._chief_name, self._chief = chief, _Task(self._coordinator, None)
        self._trains, self._num_workers = trains, num_workers
        self._opening = waiter
        return [*actions, *self._open_if_complete(now)]

    def _open_if_complete(self, now: float) -> list[Action]:
        opening = self._opening
        if self._chief is None or opening is None or len(self._asking) < self._num_workers:
            return []
        self._open = True
        if self._trains:
            self._members[self._chief_name] = self._chief
        actions = [action for task in list(self._asking) for action in self._enter(task, now)]
        self._opening = None
        return [self._set_members(), *actions, Answer(opening, Done())]

    # Workers.

    def ask(self, waiter: Waiter, task: str, boot: int, now: float) -> list[Action]:
        """A worker wants to take part. A repetition takes the place of the first.

        One that comes when training has just ended finds that out in its session.

        Args:
            waiter: Gets the answer.
            task: The worker's name.
            boot: Incarnation under which it was started.
            now: Time in seconds.
        """
        before, _ = self._asking.pop(task, (None, 0))
        actions = _replaced(before, task)
        over = self._over
        next_chief = over is not None and over.failed and self._coordinator not in self._chiefs
        if over is not None and not next_chief and (over.failed or not self._open):
            return [*actions, Answer(waiter, over)]
        self._asking[task] = waiter, boot
        if self._open and not next_chief:
            entered = self._enter(task, now)
            return [*actions, self._set_members(), *entered]
        return [*actions, *self._open_if_complete(now)]

    def _enter(self, task: str, now: float) -> list[Action]:
        waiter, boot = self._asking.pop(task)
        incarnation = max(boot, self._coordinator + 1, self._given.get(task, 0) + 1)
        actions: list[Action] = []
        if task in self._members:
            actions.append(FenceTask(task, incarnation))
        self._given[task] = incarnation
        self._members[task] = _Task(incarnation, now + GRACE_S)
        self._missing.pop(task, None)
        self._left.discard(task)
        self._deserted_at = None
        return [*actions, Answer(waiter, SessionEntered(incarnation))]

    def leave(self, task: str, incarnation: int, now: float) -> list[Action]:
        """A replica has ended its loop."""
        member = self._members.get(task)
        if member is None or member.incarnation != incarnation:
            return []
        del self._members[task]
        self._left.add(task)
        return [self._set_members(), *self._after_a_loss(now)]

    def fail(
        self, task: str, incarnation: int, error: tuple[str, str, str], now: float
    ) -> list[Action]:
        """A replica has left by an error: its type name, message and traceback."""
        member = self._members.get(task)
        if member is None or member.incarnation != incarnation:
            return []
        actions: list[Action] = []
        if self._over is None or not self._over.failed:
            headline = ": ".join(filter(None, [error[0], error[1].partition("\n")[0]]))
            over = TrainingOver(f"{task} failed: {headline}", True, (task, *error))
            actions += self._end(over)
            self._over = over
        return [*actions, *self.leave(task, incarnation, now)]

    # The end.

    def end(self, reason: str, failed: bool) -> list[Action]:
        """Training is over; the first reason counts, unless a replica fails after it."""
        return self._end(TrainingOver(reason, failed, None))

    def _end(self, over: TrainingOver) -> list[Action]:
        if self._over is not None:
            return []
        self._over = over
        self._deserted_at = None
        actions: list[Action] = [CloseTokens(over.reason)]
        waiting = [*self._watching, *(waiter for waiter, _ in self._asking.values())]
        actions += [Answer(waiter, over) for waiter in waiting]
        self._watching.clear()
        self._asking.clear()
        return actions

    def leave_as_chief(self, waiter: Waiter, now: float) -> list[Action]:
        """The chief leaves, and training ends; it is told when all others have left."""
        actions = _replaced(self._ending, self._chief_name) + self.end("the chief has left", False)
        self._ending = waiter
        if self._trains and self._members.pop(self._chief_name, None) is not None:
            actions.append(self._set_members())
        return [*actions, *self._after_a_loss(now)]

    def await_end(self, waiter: Waiter) -> list[Action]:
        """Somebody wants to be told when training is over."""
        if self._over is not None:
            return [Answer(waiter, self._over)]
        self._watching[waiter] = None
        return []

    def forget(self, waiter: Waiter) -> None:
        """Whoever waited has given up."""
        self._watching.pop(waiter, None)
        for task in [task for task, (asking, _) in self._asking.items() if asking == waiter]:
            del self._asking[task]
        if self._opening == waiter:
            self._opening = self._chief = None
        if self._ending == waiter:
            self._ending = None

    # Connections and time.

    def connected(self, task: str, incarnation: int) -> None:
        """A task has a connection under this incarnation."""
        if _may_lead(task):
            self._chiefs.add(incarnation)
        for known in self._known(task, incarnation):
            known.lost_at = None

    def disconnected(self, task: str, incarnation: int, now: float) -> None:
        """A task has no connection under this incarnation any more."""
        if _may_lead(task):
            self._chiefs.discard(incarnation)
        for known in self._known(task, incarnation):
            known.lost_at = now + GRACE_S

    def _known(self, task: str, incarnation: int) -> list[_Task]:
        chief = self._chief if task == self._chief_name else None
        return [
            known
            for known in (self._members.get(task), chief)
            if known is not None and known.incarnation == incarnation
        ]

    def next_deadline(self) -> float | None:
        """Return the time at which ``tick`` has something to do, or None."""
        tasks = [*self._members.values(), *([self._chief] if self._chief is not None else [])]
        times = [task.lost_at for task in tasks if task.lost_at is not None]
        if self._deserted_at is not None:
            times.append(self._deserted_at)
        return min(times, default=None)

    def tick(self, now: float) -> list[Action]:
        """Give up those whose time has come."""
        actions: list[Action] = []
        lost = [(task, member) for task, member in self._members.items() if member.is_lost(now)]
        for task, member in lost:
            del self._members[task]
            self._missing[task] = None
            if member is not self._chief:
                actions.append(FenceTask(task, member.incarnation + 1))
        if lost:
            actions += [self._set_members(), *self._after_a_loss(now)]
        if self._chief is not None and self._chief.is_lost(now):
            actions += self._lose_chief()
        if self._deserted_at is not None and now >= self._deserted_at:
            names = ", ".join(self._missing)
            actions += self.end(f"no replica is left: {names} did not come back", True)
        return actions

    def _lose_chief(self) -> list[Action]:
        text = f"the chief, {self._chief_name}, was lost"
        actions = _refused(text, self._opening, self._ending)
        self._chief = self._opening = self._ending = None
        return [*actions, *(self.end(text, True) if self._open else [])]

    def _after_a_loss(self, now: float) -> list[Action]:
        """What follows if nobody is left who trains."""
        if self._members:
            return []
        if self._over is not None:
            ending, self._ending = self._ending, None
            return [] if ending is None else [Answer(ending, self._over)]
        if self._missing:
            self._deserted_at = now + DESERTED_S
            return []
        return self.end("all replicas have left", False)

    def _set_members(self) -> SetMembers:
        alive = {task: member.incarnation for task, member in self._members.items()}
        return SetMembers(alive, tuple(self._missing))

    def statistics(self) -> dict[str, Any]:
        """Return who takes part, who wants to, and who was lost or has left."""
        return {
            "members": sorted(self._members),
            "asking": sorted(self._asking),
            "missing": list(self._missing),
            "left": sorted(self._left),
            "over": "" if self._over is None else self._over.reason,
        }


def _may_lead(task: str) -> bool:
    return task.startswith("/job:chief/")


def _replaced(before: Waiter | None, task: str) -> list[Action]:
    """Let go of an earlier request that its sender has repeated."""
    return _refused(f"a newer request of {task} has replaced this one", before)


def _refused(reason: str, *waiters: Waiter | None) -> list[Action]:
    return [Answer(waiter, FencedError(reason)) for waiter in waiters if waiter is not None]
