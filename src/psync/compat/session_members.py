"""Members of training sessions without a coordinator: the rule on ps 0.

Every worker runs its own loop, as in TensorFlow's between-graph replication. The target of a
synchronous step follows the living workers, so ps 0 keeps the list of them. Its inputs are the
requests of tasks, their connections and the time; what follows is done by ``Effects``.

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

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from psync.errors import FencedError, PsyncError
from psync.wire.codec import Message
from psync.wire.messages import Done, SessionEntered, TrainingOver

GRACE_S = 5.0
"""How long a replica or the chief may be without a connection to ps 0."""

DESERTED_S = 60.0
"""How long a lost replica may take to come back when there is no other."""

Waiter: TypeAlias = Hashable
"""Whoever waits for an answer. Opaque."""


class Effects(Protocol):
    """Does what follows from the rule. Nothing here may call the rule."""

    def answer(self, waiter: Any, answer: Message | PsyncError) -> None:
        """Answer whoever waits: SessionEntered, Done, TrainingOver, or the error of a refusal."""

    def set_members(self, alive: dict[str, int], missing: tuple[str, ...]) -> None:
        """Tell the synchronous groups who lives (task → incarnation), and who was lost."""

    def fence(self, task: str, below: int) -> None:
        """Let every ps refuse incarnations of the task below this one."""

    def close_tokens(self, reason: str) -> None:
        """Training has ended: let nobody wait for a token any more."""


@dataclass(slots=True)
class _Task:
    """A replica, or the chief."""

    incarnation: int
    lost_at: float | None  # time at which it is lost unless it connects; None: it is connected

    def is_lost(self, now: float) -> bool:
        return self.lost_at is not None and now >= self.lost_at


class SessionMembers:
    """The replicas of one cluster without a coordinator. Single owner, no clock; never blocks."""

    def __init__(self, effects: Effects) -> None:
        self._do = effects
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

    def attached(self, coordinator: int) -> None:
        """A chief has attached the ps tasks. A new one: whatever was before is over."""
        if coordinator <= self._coordinator:
            return
        self._coordinator = coordinator
        reason = "a new chief has attached the ps tasks"
        over = TrainingOver(reason, True, None)
        for waiter in self._watching:
            self._do.answer(waiter, over)
        self._refuse(reason, self._opening, self._ending)
        self._reset()

    def declared(
        self, waiter: Waiter, chief: str, trains: bool, num_workers: int, now: float
    ) -> None:
        """The variables are there. Training begins when so many workers have asked to take part.

        Args:
            waiter: Gets the answer then. A repetition takes the place of the first.
            chief: Name of the chief.
            trains: Whether it is a replica.
            num_workers: How many others it waits for.
            now: Time in seconds.
        """
        if self._open:
            self._do.answer(waiter, Done())
            return
        self._replace(self._opening, chief)
        self._chief_name, self._chief = chief, _Task(self._coordinator, None)
        self._trains, self._num_workers = trains, num_workers
        self._opening = waiter
        self._open_if_complete(now)

    def _open_if_complete(self, now: float) -> None:
        opening = self._opening
        if self._chief is None or opening is None or len(self._asking) < self._num_workers:
            return
        self._open, self._opening = True, None
        if self._trains:
            self._members[self._chief_name] = self._chief
        self._enter(list(self._asking), now)
        self._do.answer(opening, Done())

    # Workers.

    def ask(self, waiter: Waiter, task: str, boot: int, now: float) -> None:
        """A worker wants to take part. A repetition takes the place of the first.

        One that comes when training has just ended finds that out in its session.

        Args:
            waiter: Gets the answer.
            task: The worker's name.
            boot: Incarnation under which it was started.
            now: Time in seconds.
        """
        before, _ = self._asking.pop(task, (None, 0))
        self._replace(before, task)
        over = self._over
        next_chief = over is not None and over.failed and self._coordinator not in self._chiefs
        if over is not None and not next_chief and (over.failed or not self._open):
            self._do.answer(waiter, over)
            return
        self._asking[task] = waiter, boot
        if self._open and not next_chief:
            self._enter([task], now)
        else:
            self._open_if_complete(now)

    def _enter(self, tasks: Iterable[str], now: float) -> None:
        entered: list[tuple[str, bool, Waiter, int]] = []
        for task in tasks:
            waiter, boot = self._asking.pop(task)
            incarnation = max(boot, self._coordinator + 1, self._given.get(task, 0) + 1)
            entered.append((task, task in self._members, waiter, incarnation))
            self._given[task] = incarnation
            self._members[task] = _Task(incarnation, now + GRACE_S)
            self._missing.pop(task, None)
            self._left.discard(task)
            self._deserted_at = None
        self._set_members()
        for task, is_replaced, waiter, incarnation in entered:
            if is_replaced:
                self._do.fence(task, incarnation)
            self._do.answer(waiter, SessionEntered(incarnation))

    def leave(self, task: str, incarnation: int, now: float) -> None:
        """A replica has ended its loop."""
        if self._takes_part(task, incarnation):
            del self._members[task]
            self._left.add(task)
            self._set_members()
            self._after_a_loss(now)

    def fail(self, task: str, incarnation: int, error: tuple[str, str, str], now: float) -> None:
        """A replica has left by an error: its type name, message and traceback."""
        if not self._takes_part(task, incarnation):
            return
        if self._over is None or not self._over.failed:
            headline = ": ".join(filter(None, [error[0], error[1].partition("\n")[0]]))
            over = TrainingOver(f"{task} failed: {headline}", True, (task, *error))
            self._end(over)
            self._over = over
        self.leave(task, incarnation, now)

    def _takes_part(self, task: str, incarnation: int) -> bool:
        member = self._members.get(task)
        return member is not None and member.incarnation == incarnation

    # The end.

    def end(self, reason: str, failed: bool) -> None:
        """Training is over; the first reason counts, unless a replica fails after it."""
        self._end(TrainingOver(reason, failed, None))

    def _end(self, over: TrainingOver) -> None:
        if self._over is not None:
            return
        self._over = over
        self._deserted_at = None
        self._do.close_tokens(over.reason)
        for waiter in [*self._watching, *(waiter for waiter, _ in self._asking.values())]:
            self._do.answer(waiter, over)
        self._watching.clear()
        self._asking.clear()

    def leave_as_chief(self, waiter: Waiter, now: float) -> None:
        """The chief leaves, and training ends; it is told when all others have left."""
        self._replace(self._ending, self._chief_name)
        self.end("the chief has left", False)
        self._ending = waiter
        if self._trains and self._members.pop(self._chief_name, None) is not None:
            self._set_members()
        self._after_a_loss(now)

    def await_end(self, waiter: Waiter) -> None:
        """Somebody wants to be told when training is over."""
        if self._over is not None:
            self._do.answer(waiter, self._over)
        else:
            self._watching[waiter] = None

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

    def tick(self, now: float) -> None:
        """Give up those whose time has come."""
        lost = [(task, member) for task, member in self._members.items() if member.is_lost(now)]
        for task, member in lost:
            del self._members[task]
            self._missing[task] = None
            if member is not self._chief:
                self._do.fence(task, member.incarnation + 1)
        if lost:
            self._set_members()
            self._after_a_loss(now)
        if self._chief is not None and self._chief.is_lost(now):
            text = f"the chief, {self._chief_name}, was lost"
            self._refuse(text, self._opening, self._ending)
            self._chief = self._opening = self._ending = None
            if self._open:
                self.end(text, True)
        if self._deserted_at is not None and now >= self._deserted_at:
            names = ", ".join(self._missing)
            self.end(f"no replica is left: {names} did not come back", True)

    def _after_a_loss(self, now: float) -> None:
        """See what follows if nobody is left who trains."""
        if self._members:
            return
        if self._over is not None:
            ending, self._ending = self._ending, None
            if ending is not None:
                self._do.answer(ending, self._over)
        elif self._missing:
            self._deserted_at = now + DESERTED_S
        else:
            self.end("all replicas have left", False)

    def _set_members(self) -> None:
        alive = {task: member.incarnation for task, member in self._members.items()}
        self._do.set_members(alive, tuple(self._missing))

    def _replace(self, before: Waiter | None, task: str) -> None:
        """Let go of an earlier request that its sender has repeated."""
        self._refuse(f"a newer request of {task} has replaced this one", before)

    def _refuse(self, reason: str, *waiters: Waiter | None) -> None:
        for waiter in waiters:
            if waiter is not None:
                self._do.answer(waiter, FencedError(reason))

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
