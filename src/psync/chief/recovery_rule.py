"""The rule of recovery: what follows the loss of ps tasks. Pure; ``recovery`` performs it.

One machine, three strategies. A ps whose backup is complete fails over to it; otherwise all ps
tasks roll back to a checkpoint; otherwise, if nothing has been computed yet, the lost ones get
their variables again; otherwise it is the end. Every event returns actions. At most one of them is
a *step*, the last: it takes time, and ``done`` or ``failed`` follows.

| state | event | next state | actions |
|---|---|---|---|
| RUNNING | a ps is lost, its backup is complete | FAILOVER | HOLD; then a round |
| RUNNING | a ps is lost, and there are checkpoints | ROLLBACK | HOLD, END_SESSIONS, GoHome; READ |
| RUNNING | the same, and nothing was computed | FRESH_START | HOLD, END_SESSIONS, GoHome; ATTACH |
| RUNNING | a ps is lost, and there is nothing | GONE | End |
| FAILOVER | a ps is lost | FAILOVER | its backup is promoted in this round, too |
| FAILOVER | a step is done | FAILOVER | the next of the round |
| FAILOVER | the round is done | RUNNING | END_SESSIONS, FailedOver, RESUME |
| FAILOVER | a step fails, or one that is lost has no backup | ROLLBACK or GONE | as from RUNNING |
| ROLLBACK | a ps is lost | ROLLBACK | GoHome; what it was needed for fails |
| ROLLBACK | READ, ATTACH, LOAD is done | ROLLBACK | the next step |
| ROLLBACK | SWITCH is done | ROLLBACK | RolledBack; ADOPT |
| ROLLBACK | ADOPT is done | RUNNING | RESUME |
| ROLLBACK | a step fails since a ps was lost, or one is when all are done | ROLLBACK | READ again |
| ROLLBACK | a step fails otherwise, or 50 in a row do | GONE | End |
| FRESH_START | as in ROLLBACK, with ATTACH, CREATE, ADOPT | | no RolledBack: nothing is undone |
| FRESH_START | a step fails otherwise, or it is the fifth time | GONE | End, with the first error |
| not started | a ps is lost, and has no backup | GONE | End: the coordinator is made anew |
| any but CLOSED | a newer coordinator has come | GONE | End |
| GONE | a ps is lost | GONE | none: what is scheduled ends with the first reason |
| any | the coordinator is closed | CLOSED | End, if it was recovering; from then on none |

The round of a failover: LetAlone for each ps whose backup died with another one's process (before
anybody is promoted: if this coordinator dies then, the next one knows of all others that they were
not replaced); Promote and Attach for each that is lost; Attach for ps 0, which closes the steps of
all and has to know where they are served.

| dies | while | what follows |
|---|---|---|
| a ps | training runs | failover; without a backup rollback; without a checkpoint the end |
| several that are served in one process | | each that has a backup counts as lost with the first |
| the process with a backup | a backup is kept | its primary goes on alone, and gets another one |
| the process with a backup | that is promoted | rollback |
| another ps | one is promoted | its backup is promoted next |
| the one that was promoted | before its next backup is complete | rollback |
| a ps | all roll back | they begin again |
| a ps | the coordinator starts | it starts again, see ``ClusterCoordinator.start`` |
| a ps | variables are created or restored | a fresh start; what restores does it again |
| a worker | any of this | nothing: all sessions end anyway |
| the coordinator | any of this | the next one attaches, see ``Creation`` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from psync.cluster import task_name
from psync.errors import ConnectionLost, FencedError, ParameterServerLost

MAX_ATTEMPTS = 50
"""In a row: ps tasks that die again and again while they are being recovered."""

MAX_STARTS = 5
"""Fresh starts of one coordinator, and attempts to start one: then something is wrong."""

UNSAVED = "no CheckpointManager has saved anything yet"


class State(Enum):
    """Whether training runs."""

    RUNNING = "running"
    FAILOVER = "failing over"
    ROLLBACK = "rolling back"
    FRESH_START = "starting afresh"
    GONE = "gone"  # a ps is lost for good, or a newer coordinator has come
    CLOSED = "closed"


class Do(Enum):
    """Actions that take no time, and need no more to be said."""

    HOLD = "let requests to ps tasks and closures wait, end gangs, make no backups"
    END_SESSIONS = "give up all workers: each gets a new incarnation, and hears of ps tasks"
    RESUME = "let everything go on; ps tasks know nothing of what they were told"


class RollbackStep(Enum):
    """The steps of a rollback, and of a fresh start."""

    READ = "read the newest checkpoint"
    ATTACH = "wait until every ps is there"
    LOAD = "let every ps prepare its snapshot"
    SWITCH = "let every ps restore it, in a new timeline"
    CREATE = "let every ps go on alone, then create variables again on those that were lost"
    ADOPT = "let every ps say that it may be attached from now on"


@dataclass(frozen=True, slots=True)
class Warn:
    """Log this."""

    text: str


@dataclass(frozen=True, slots=True)
class GoHome:
    """Look for a ps where it was at the beginning."""

    ps: int


@dataclass(frozen=True, slots=True)
class LetAlone:
    """Step: order a ps to go on without its backup."""

    ps: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Step: let the backup of a ps, in the process of ``host``, serve in its place."""

    ps: int
    host: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Step: attach a ps, and let it know where all are served."""

    ps: int


@dataclass(frozen=True, slots=True)
class FailedOver:
    """Tell the program."""

    served: dict[int, int]  # in whose process each lost ps is served now


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Tell the program, of these ps tasks."""

    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Fail what is scheduled, and let requests go on: they fail, or do not need what is lost."""

    error: Exception
    all_lost: bool = False  # whether requests to every ps fail: some have rolled back, or none
    why: str = ""  # begins the line of the log


Step: TypeAlias = LetAlone | Promote | Attach | RollbackStep
Action: TypeAlias = Do | Warn | GoHome | FailedOver | RolledBack | End | Step


class Failover:
    """One failover: the backups of ps tasks that are lost are promoted, one after the other."""

    state = State.FAILOVER

    def __init__(self, rule: RecoveryRule) -> None:
        self._rule = rule
        self._alone: list[int] = []  # they wait for backups that died
        self._served: dict[int, int] = {}
        self._step: Step | None = None

    def lost(self, ps: int) -> list[Action]:
        """Note a ps, and what died with its process."""
        rule, dead = self._rule, self._rule.homes[ps]
        self._served.pop(ps, None)
        for other, home in enumerate(rule.homes):
            if home == dead and rule.hosts[other] is not None:  # it will be found out, but later
                task, why = task_name("ps", other), f"was in the process of {task_name('ps', ps)}"
                rule.lost_ps.setdefault(other, ParameterServerLost(task, why))
        alone = [other for other, host in enumerate(rule.hosts) if host == dead]
        for other in alone:
            rule.hosts[other] = None
        self._alone = [other for other in (*self._alone, *alone) if other not in rule.lost_ps]
        return []

    def next(self) -> list[Action]:
        """Return the next step of the round, or the end of it."""
        if self._alone:
            return self._begin(LetAlone(self._alone.pop(0)))
        if waiting := self._waiting():
            ps, host = waiting[0], self._rule.hosts[waiting[0]]
            if host is not None:
                return self._begin(Promote(ps, host))
            return self._fall_back(f"{task_name('ps', ps)} had no complete backup")
        if self._step != Attach(0):
            return self._begin(Attach(0))
        self._rule.recovered()
        return [Do.END_SESSIONS, FailedOver(self._served), Do.RESUME]

    def _waiting(self) -> list[int]:
        """Return who is lost, and not promoted yet."""
        return [ps for ps in self._rule.lost_ps if ps not in self._served]

    def _begin(self, step: Step) -> list[Action]:
        self._step = step
        return [step]

    def done(self) -> list[Action]:
        """Go on."""
        if not isinstance(self._step, Promote):
            return self.next()
        ps, host = self._step.ps, self._step.host
        self._served[ps] = self._rule.homes[ps] = host
        self._rule.hosts[ps] = None
        return self._begin(Attach(ps))

    def failed(self, error: Exception) -> list[Action]:
        """Go on if a ps was lost meanwhile, which is noted; else no backup can help."""
        if isinstance(error, ParameterServerLost) and not isinstance(self._step, Promote):
            return self.next()
        return self._fall_back(repr(error))

    def _fall_back(self, why: str) -> list[Action]:
        lost = self._waiting() or list(self._served)
        warning = Warn(f"{task_name('ps', lost[0])}: its backup cannot take over: {why}")
        return [warning, *self._rule.roll_back(lost)]


class Rollback:
    """One rollback: all ps tasks restore the newest checkpoint."""

    state = State.ROLLBACK
    steps: tuple[RollbackStep, ...] = (
        RollbackStep.READ, RollbackStep.ATTACH, RollbackStep.LOAD, RollbackStep.SWITCH,
        RollbackStep.ADOPT,
    )  # fmt: skip

    def __init__(self, rule: RecoveryRule) -> None:
        self._rule = rule
        self._at = 0  # which step is under way
        self._lost: dict[int, ParameterServerLost] = {}  # since it was last attached to
        self._failures = 0

    def lost(self, ps: int) -> list[Action]:
        """Note a ps: the step fails, or all begin again when they are done."""
        rule, dead = self._rule, self._rule.homes[ps]
        self._lost[ps] = rule.lost_ps[ps]
        moved = [other for other, home in enumerate(rule.homes) if home == dead]
        for other in moved:
            rule.homes[other] = other
            why = f"was in the process of {task_name('ps', ps)}"
            rule.lost_ps.setdefault(other, ParameterServerLost(task_name("ps", other), why))
        return [GoHome(other) for other in moved]

    def next(self) -> list[Action]:
        """Return the present step."""
        step = self.steps[self._at]
        if step is RollbackStep.ATTACH:
            self._lost.clear()  # whoever is lost is looked for now
        return [step]

    def done(self) -> list[Action]:
        """Go on."""
        finished = self.steps[self._at]
        if finished is not RollbackStep.ADOPT:
            self._at += 1
            news = [RolledBack(tuple(self._rule.lost_ps))]
            return [*(news if finished is RollbackStep.SWITCH else ()), *self.next()]
        if self._lost:  # after it had answered
            return self.failed(next(iter(self._lost.values())))
        self._rule.recovered()
        return [Do.RESUME]

    def failed(self, error: Exception) -> list[Action]:
        """Begin again if a ps was lost meanwhile; else there is no way to go back."""
        if isinstance(error, ParameterServerLost | ConnectionLost) and self._may_try_again():
            self._at = 0
            return [Warn(f"recovery starts again: {error}"), *self.next()]
        names = [task_name("ps", ps) for ps in self._rule.lost_ps]
        return self._rule.end(self._end(names[0], error), all_lost=True)

    def _may_try_again(self) -> bool:
        self._failures += 1
        return self._failures < MAX_ATTEMPTS

    def _end(self, task: str, error: Exception) -> ParameterServerLost:
        end = ParameterServerLost(
            task,
            f"was lost, and the rollback to a checkpoint failed: {error}",
            hint="restart the program: it continues from its newest checkpoint",
        )
        end.__cause__ = error
        return end


class FreshStart(Rollback):
    """One fresh start: ps tasks that were lost before anything was computed get their variables."""

    state = State.FRESH_START
    steps = (RollbackStep.ATTACH, RollbackStep.CREATE, RollbackStep.ADOPT)

    def _may_try_again(self) -> bool:
        return self._rule.begin_fresh_start()

    def _end(self, task: str, error: Exception) -> ParameterServerLost:
        return next(iter(self._rule.lost_ps.values()))


class RecoveryRule:
    """Whether the ps tasks of one coordinator are there, are being recovered, or are gone.

    Args:
        homes: In whose process each ps is served, from now on; changed here.
        has_checkpoints: Returns whether there is something to roll back to.
        may_start_afresh: Returns whether nothing has been computed yet, and what was created can
            be created again.

    Attributes:
        started: Whether the coordinator has started; until then it is made anew if a ps is lost.
        starts: Fresh starts so far.
        hosts: In whose process the complete backup of each ps is; None: it has none. Set by
            whoever keeps the backups.
        lost_ps: Those that were lost since the recovery began, in order.
        gone: Why nothing can be done any more; None: it can.
    """

    def __init__(
        self,
        homes: list[int],
        has_checkpoints: Callable[[], bool],
        may_start_afresh: Callable[[], bool],
    ) -> None:
        self.homes = homes
        self.started = False
        self.starts = 0
        self.hosts: list[int | None] = [None] * len(homes)
        self.lost_ps: dict[int, ParameterServerLost] = {}
        self.gone: Exception | None = None
        self._has_checkpoints = has_checkpoints
        self._may_start_afresh = may_start_afresh
        self._strategy: Failover | Rollback | None = None
        self._closed = False

    @property
    def state(self) -> State:
        """Where it is."""
        if self._closed:
            return State.CLOSED
        if self._strategy is not None:
            return self._strategy.state
        return State.RUNNING if self.gone is None else State.GONE

    # Events.

    def lost(self, ps: int, error: ParameterServerLost) -> list[Action]:
        """A ps is lost, for the first time or again."""
        if self._closed or self.gone is not None:
            return []
        self.lost_ps[ps] = error
        if self._strategy is not None:
            return self._strategy.lost(ps)
        if self.hosts[ps] is None:
            return self.roll_back([ps])
        self._strategy = failover = Failover(self)
        failover.lost(ps)
        warning = Warn(f"{error.message}; its backup takes over")
        return [warning, Do.HOLD, *failover.next()]

    def done(self) -> list[Action]:
        """The step under way has succeeded."""
        return self._strategy.done() if self._strategy is not None else []

    def failed(self, error: Exception) -> list[Action]:
        """The step under way has not."""
        return self._strategy.failed(error) if self._strategy is not None else []

    def replaced(self, error: FencedError) -> list[Action]:
        """A newer coordinator has come: workers and ps tasks serve that. The first one counts."""
        if self._closed or isinstance(self.gone, FencedError):
            return []
        return self.end(error)

    def close(self) -> list[Action]:
        """The coordinator is being closed."""
        recovering, self._strategy, self._closed = self._strategy, None, True
        if recovering is None:
            return []
        task = task_name("ps", next(iter(self.lost_ps)))
        error = ParameterServerLost(task, "was lost while the coordinator was being closed")
        return [End(error, all_lost=True)]

    # What strategies come to.

    def roll_back(self, lost: Sequence[int]) -> list[Action]:
        """Let all ps tasks go back to a checkpoint, since these have no backup; or end."""
        self.hosts = [None] * len(self.hosts)
        error = self.lost_ps[lost[0]]
        if self._has_checkpoints():
            self._strategy, what = Rollback(self), "all ps tasks roll back to the newest checkpoint"
        elif self._may_start_afresh() and self.begin_fresh_start():
            self._strategy = FreshStart(self)
            what = "nothing has been computed yet: it starts again"
        else:
            why = f"{error.task} cannot be recovered: {UNSAVED}: " if self.started else ""
            return self.end(error, why=why)
        homes = [action for ps in lost for action in self._strategy.lost(ps)]
        text = f"{error.message}; {what}"
        return [Warn(text), Do.HOLD, Do.END_SESSIONS, *homes, *self._strategy.next()]

    def begin_fresh_start(self) -> bool:
        """Count one; return whether it is not one too many."""
        self.starts += 1
        return self.starts < MAX_STARTS

    def recovered(self) -> None:
        """Training runs again."""
        self._strategy = None
        self.lost_ps.clear()

    def end(self, error: Exception, *, all_lost: bool = False, why: str = "") -> list[Action]:
        """Nothing can be done any more."""
        self._strategy, self.gone = None, error
        return [End(error, all_lost, why)]
