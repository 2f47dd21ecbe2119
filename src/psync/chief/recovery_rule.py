"""The rule of recovery: what follows the loss of ps tasks. Pure; ``recovery`` is its hands.

One rule, three ways. A ps whose backup is complete fails over to it; otherwise all ps tasks roll
back to a checkpoint; otherwise, if nothing has been computed yet, the lost ones get their variables
again; otherwise it is the end. A recovery is a coroutine that awaits one *step* of its hands after
the other; a loss meanwhile is noted, and the step fails.

| state | event | next state | what is done |
|---|---|---|---|
| RUNNING | a ps is lost, its backup is complete | FAILOVER | hold; then a round |
| RUNNING | a ps is lost, and there are checkpoints | ROLLBACK | hold, end_sessions, go_home; read |
| RUNNING | the same, and nothing was computed | FRESH_START | the same; attach_all |
| RUNNING | a ps is lost, and there is nothing | GONE | end |
| FAILOVER | a ps is lost | FAILOVER | its backup is promoted in this round, too |
| FAILOVER | a step is done | FAILOVER | the next of the round |
| FAILOVER | the round is done | RUNNING | end_sessions, failed_over, resume |
| FAILOVER | a step fails, or one that is lost has no backup | ROLLBACK or GONE | as from RUNNING |
| ROLLBACK | a ps is lost | ROLLBACK | go_home; what it was needed for fails |
| ROLLBACK | read, attach_all is done | ROLLBACK | the next step |
| ROLLBACK | restore is done | ROLLBACK | rolled_back; adopt |
| ROLLBACK | restore finds the checkpoint damaged | ROLLBACK | restore the one before it |
| ROLLBACK | adopt is done | RUNNING | resume |
| ROLLBACK | a step fails since a ps was lost, or one is when all are done | ROLLBACK | read again |
| ROLLBACK | a step fails otherwise, or 50 in a row do | GONE | end |
| FRESH_START | as in ROLLBACK: attach_all, create, adopt | | no rolled_back: nothing is undone |
| FRESH_START | a step fails otherwise, or it is the fifth time | GONE | end, with the first error |
| not started | a ps is lost, and has no backup | GONE | end: the coordinator is made anew |
| any but CLOSED | a newer coordinator has come | GONE | end |
| GONE | a ps is lost | GONE | nothing: what is scheduled ends with the first reason |
| any | the coordinator is closed | CLOSED | end, if it was recovering; from then on nothing |

The round of a failover: let_alone for each ps whose backup died with another one's process (before
anybody is promoted: if this coordinator dies then, the next one knows of all others that they were
not replaced); promote and attach for each that is lost; attach for ps 0, which closes the steps of
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

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from psync.cluster import task_name
from psync.errors import ConnectionLost, FencedError, ParameterServerLost, PsyncError

if TYPE_CHECKING:
    from psync.chief.recovery import ClusterRecovery

logger = logging.getLogger(__name__)

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


OVER = (State.GONE, State.CLOSED)


class RecoveryRule:
    """Whether the ps tasks of one coordinator are there, are being recovered, or are gone.

    Args:
        hands: Do what is decided; their coroutines are the steps.
        homes: In whose process each ps is served, from now on; changed here.
        has_checkpoints: Returns whether there is something to roll back to.
        may_start_afresh: Returns whether nothing has been computed yet, and what was created can
            be created again.

    Attributes:
        state: Whether training runs.
        started: Whether the coordinator has started; until then it is made anew if a ps is lost.
        starts: Fresh starts so far.
        hosts: In whose process the complete backup of each ps is; None: it has none. Set by
            whoever keeps the backups.
        lost_ps: Those that were lost since the recovery began, in order.
        gone: Why nothing can be done any more; None: it can.
    """

    def __init__(
        self,
        hands: ClusterRecovery,
        homes: list[int],
        has_checkpoints: Callable[[], bool],
        may_start_afresh: Callable[[], bool],
    ) -> None:
        self.state = State.RUNNING
        self.homes = homes
        self.started = False
        self.starts = 0
        self.hosts: list[int | None] = [None] * len(homes)
        self.lost_ps: dict[int, ParameterServerLost] = {}
        self.gone: Exception | None = None
        self._hands = hands
        self._has_checkpoints = has_checkpoints
        self._may_start_afresh = may_start_afresh
        # Of a failover: who waits for a backup that died, how that ended, who is served where now.
        self._alone: list[int] = []
        self._ends: dict[int, str] = {}
        self._served: dict[int, int] = {}
        # Of a rollback: who was lost since all were last attached.
        self._lost_since: dict[int, ParameterServerLost] = {}

    # Events.

    def lost(self, ps: int, error: ParameterServerLost) -> None:
        """A ps is lost, for the first time or again."""
        if self.state in OVER:
            return
        self.lost_ps[ps] = error
        if self.state is State.FAILOVER:
            self._note_dead(ps)
        elif self.state is not State.RUNNING:
            self._look_at_home(ps)
        elif self.hosts[ps] is not None:
            logger.warning("%s; its backup takes over", error.message)
            self.state = State.FAILOVER
            self._alone, self._ends, self._served = [], {}, {}
            self._note_dead(ps)
            self._hands.hold()
            self._hands.recover(self._fail_over)
        elif self._goes_back([ps]):
            self._hands.recover(self._go_back)

    def replaced(self, error: FencedError) -> None:
        """A newer coordinator has come: workers and ps tasks serve that. The first one counts."""
        if self.state is not State.CLOSED and not isinstance(self.gone, FencedError):
            self._hands.abandon()
            self.end(error)

    def close(self) -> None:
        """The coordinator is being closed."""
        is_recovering = self.state not in (State.RUNNING, *OVER)
        self.state = State.CLOSED
        if is_recovering:
            self._hands.abandon()
            task = task_name("ps", next(iter(self.lost_ps)))
            error = ParameterServerLost(task, "was lost while the coordinator was being closed")
            self._hands.end(error, all_lost=True, why="")

    def end(self, error: Exception, *, all_lost: bool = False, why: str = "") -> None:
        """Nothing can be done any more."""
        self.state, self.gone = State.GONE, error
        self._hands.end(error, all_lost=all_lost, why=why)

    def _recovered(self) -> None:
        self.state = State.RUNNING
        self.lost_ps.clear()

    # Failover: the backups of ps tasks that are lost are promoted, one after the other.

    def _note_dead(self, ps: int) -> None:
        """Note what died with the process of a ps."""
        dead = self.homes[ps]
        self._served.pop(ps, None)
        for other, host in enumerate(self.hosts):
            if host == dead:
                self.hosts[other] = None
                self._alone.append(other)
                self._ends[other] = f"it died with the process of {task_name('ps', dead)}"
            elif host is not None and self.homes[other] == dead:  # it will be found out, but later
                self._note_lost_with(ps, other)
        self._alone = [other for other in self._alone if other not in self.lost_ps]

    def _note_lost_with(self, ps: int, other: int) -> None:
        error = ParameterServerLost(
            task_name("ps", other), f"was in the process of {task_name('ps', ps)}"
        )
        self.lost_ps.setdefault(other, error)

    async def _fail_over(self) -> None:
        if not (problem := await self._promote_all()):
            self._recovered()
            self._hands.end_sessions()
            self._hands.failed_over(self._served)
            self._hands.resume()
            return
        lost = self._waiting() or list(self._served)
        problem = f"its backup cannot take over: {problem}"
        logger.warning("%s: %s", task_name("ps", lost[0]), problem)
        if self._goes_back(lost, problem):
            await self._go_back()

    def _waiting(self) -> list[int]:
        """Return who is lost, and not promoted yet."""
        return [ps for ps in self.lost_ps if ps not in self._served]

    async def _promote_all(self) -> str:
        """Carry out a round; return why it cannot be done, or ""."""
        attached = -1  # the last one
        while True:
            try:
                if self._alone:
                    attached = -1
                    await self._hands.let_alone(self._alone.pop(0))
                elif waiting := self._waiting():
                    attached = waiting[0]
                    if problem := await self._promote(attached):
                        return problem
                    await self._hands.attach(attached)
                elif attached:
                    attached = 0
                    await self._hands.attach(0)
                else:
                    return ""
            except ParameterServerLost:
                pass  # it is noted
            except Exception as exc:
                return repr(exc)

    async def _promote(self, ps: int) -> str:
        """Let the backup of a ps serve in its place; return why it does not, or ""."""
        if (host := self.hosts[ps]) is None:
            return self._ends.get(ps, f"{task_name('ps', ps)} had no complete backup")
        try:
            await self._hands.promote(ps, host)
        except Exception as exc:
            return repr(exc)
        self._served[ps] = self.homes[ps] = host
        self.hosts[ps] = None
        return ""

    # Rollback to the newest checkpoint, and the fresh start of lost ps tasks.

    def _goes_back(self, lost: Sequence[int], problem: str = "") -> bool:
        """Decide where all ps tasks go back to, since these have no backup; False: it is over.

        Args:
            lost: The ps tasks.
            problem: Why no backup takes over; part of the final error.
        """
        self.hosts = [None] * len(self.hosts)
        error = self.lost_ps[lost[0]]
        if self._has_checkpoints():
            self.state, what = State.ROLLBACK, "all ps tasks roll back to the newest checkpoint"
        elif self._may_start_afresh() and self.begin_fresh_start():
            self.state = State.FRESH_START
            what = "nothing has been computed yet: it starts again"
        else:
            why = f"{error.task} cannot be recovered: {UNSAVED}: " if self.started else ""
            if problem:
                error.message += f"; {problem}"
            self.end(error, why=why)
            return False
        logger.warning("%s; %s", error.message, what)
        self._hands.hold()
        self._hands.end_sessions()
        for ps in lost:
            self._look_at_home(ps)
        return True

    def begin_fresh_start(self) -> bool:
        """Count one; return whether it is not one too many."""
        self.starts += 1
        return self.starts < MAX_STARTS

    def _look_at_home(self, ps: int) -> None:
        dead, self._lost_since[ps] = self.homes[ps], self.lost_ps[ps]
        for other, home in enumerate(self.homes):
            if home == dead:
                self.homes[other] = other
                self._note_lost_with(ps, other)
                self._hands.go_home(other)

    async def _go_back(self) -> None:
        failures, rolls_back = 0, self.state is State.ROLLBACK
        while True:
            try:
                await self._try_to_go_back()
            except Exception as exc:
                failures += 1
                may_again = failures < MAX_ATTEMPTS if rolls_back else self.begin_fresh_start()
                if isinstance(exc, ParameterServerLost | ConnectionLost) and may_again:
                    logger.warning("recovery starts again: %s", exc)
                    continue
                first, error = next(iter(self.lost_ps.items()))
                if rolls_back:
                    error = _no_way_back(task_name("ps", first), exc)
                self.end(error, all_lost=True)
            else:
                self._recovered()
                self._hands.resume()
            return

    async def _try_to_go_back(self) -> None:
        hands, rolls_back = self._hands, self.state is State.ROLLBACK
        if rolls_back:
            await hands.read()
        self._lost_since.clear()  # whoever is lost is looked for now
        await hands.attach_all()
        if rolls_back:
            while not await hands.restore():
                await hands.read()
            hands.rolled_back(tuple(self.lost_ps))
        else:
            await hands.create(tuple(self.lost_ps))
        await hands.adopt()
        for error in self._lost_since.values():  # after it had answered
            raise error


def _no_way_back(task: str, cause: Exception) -> ParameterServerLost:
    said, hint = str(cause), None
    if isinstance(cause, PsyncError):
        said, hint = cause.message, cause.hint
    error = ParameterServerLost(
        task,
        f"was lost, and the rollback to a checkpoint failed: {said}",
        hint=hint or "restart the program: it continues from its newest checkpoint",
    )
    error.__cause__ = cause
    return error
