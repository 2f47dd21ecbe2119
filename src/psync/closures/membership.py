"""Membership: liveness and incarnations of tasks, and the consequences of a loss.

``Membership`` is the coordinator's view. Its inputs are connections made and ended, and the time;
it returns what follows from that.

**Incarnations** distinguish a task from its earlier runs. A task says at the handshake which one it
was started under (its boot incarnation); on every connection it is assigned
``max(boot incarnation, last assigned + 1)``. So a worker whose connection broke and came back is a
new client too: its closures run elsewhere by then.

**A worker** is lost as soon as its connection is: its closures are cheap to run again. Before that,
every ps is told to refuse what the lost incarnation may still send.

**A worker that leaves** says so before its connection ends. It is not waited for, and is taken back
if it returns. Its incarnation is fenced like a lost one's, since messages may be under way.

**Workers may be added** while training goes on. A name is never forgotten, so that the
next worker of that name gets incarnations above all earlier ones.

**A ps** holds state, so a broken connection says little. It is unreachable at first. If it returns
under the same boot incarnation, its memory is as it was; under another one it is empty, and so its
shards are lost; if it stays away for ``ps_timeout_s`` they are given up. One that was given up and
returns with its memory is reported as back, too; the coordinator decides whether that still helps.
A ps that connects is sent the fences of all workers that were lost before.

Source: TensorFlow's ``ClusterCoordinator`` and its ``WorkerPreemptionHandler``. Different: every
task recovers by itself, a lost task is known by its connection and incarnation and not by the text
of an error, and a ps may return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from psync.errors import LocalProtocolError

PS_TIMEOUT_S = 30.0
BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 5.0
BACKOFF_FACTOR = 1.6


class TaskState(Enum):
    CONNECTING = "connecting"  # was never here
    ALIVE = "alive"
    UNREACHABLE = "unreachable"  # a ps that may return with its memory
    LOST = "lost"  # may return; what it held is given up
    LEFT = "left"  # a worker that went in order, or is not wanted any more: nobody waits for it


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The consequences of the end of a coordinator's session with a worker.

    | the end | its closures | the worker |
    |---|---|---|
    | without a word | come back, and are blamed | is lost, which counts |
    | the worker leaves | come back, if any are left | is not waited for; may return |
    | it cannot go on, and says why | come back | is lost, which counts unless a ps is missing |
    | the coordinator ends it | come back; are blamed if one was too slow | begins again |

    A worker whose losses count is set aside if there are too many; see ``Flapping``.
    """

    in_order: bool  # the worker has left
    blame: bool  # what it ran may be the cause
    counts: bool  # as a loss of the worker

    @classmethod
    def of(
        cls, leaving: bool, sent_away: bool | None, reason: str, *, misses_ps: bool
    ) -> SessionEnd:
        """Return what an end means.

        Args:
            leaving: Whether the worker has said that it leaves.
            sent_away: None unless the coordinator ends it; then whether what runs is to blame.
            reason: What the worker gave as its reason for not going on, or "".
            misses_ps: Whether a ps cannot be reached, which is a reason not to go on.
        """
        if leaving:
            return cls(in_order=True, blame=False, counts=False)
        if sent_away is not None:
            return cls(in_order=False, blame=sent_away, counts=False)
        if reason:
            return cls(in_order=False, blame=False, counts=not misses_ps)
        return cls(in_order=False, blame=True, counts=True)


class TaskEvent(Enum):
    CONNECT = "connect"
    LOSE_WORKER = "lose its connection (worker)"
    LEAVE = "leave"
    ADD = "be added"
    LOSE_PS = "lose its connection (ps)"
    TIME_OUT = "time out"


MOVES: dict[TaskState, dict[TaskEvent, TaskState]] = {
    TaskState.CONNECTING: {TaskEvent.CONNECT: TaskState.ALIVE, TaskEvent.LEAVE: TaskState.LEFT},
    TaskState.ALIVE: {
        TaskEvent.LOSE_WORKER: TaskState.LOST,
        TaskEvent.LEAVE: TaskState.LEFT,
        TaskEvent.LOSE_PS: TaskState.UNREACHABLE,
    },
    TaskState.UNREACHABLE: {
        TaskEvent.CONNECT: TaskState.ALIVE,
        TaskEvent.TIME_OUT: TaskState.LOST,
    },
    TaskState.LOST: {TaskEvent.CONNECT: TaskState.ALIVE, TaskEvent.LEAVE: TaskState.LEFT},
    TaskState.LEFT: {
        TaskEvent.CONNECT: TaskState.ALIVE,
        TaskEvent.ADD: TaskState.CONNECTING,
        TaskEvent.LEAVE: TaskState.LEFT,
    },
}


# --- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """Tell the task, which has just connected, that it is this incarnation from now on."""

    task: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Tell ``ps`` to refuse everything from incarnations of ``task`` below ``below``."""

    ps: str
    task: str
    below: int


@dataclass(frozen=True, slots=True)
class WorkerIsLost:
    """The worker is gone, lost or because it left: put back what it held."""

    task: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ParameterServerUnreachable:
    """Nothing is lost yet: connect again, and let what needs this ps wait."""

    task: str


@dataclass(frozen=True, slots=True)
class ParameterServerBack:
    """The ps is reachable again, with the memory that it had."""

    task: str


@dataclass(frozen=True, slots=True)
class ParameterServerIsLost:
    """What the ps held is gone. If it is alive, it is empty and can be restored to."""

    task: str


Action: TypeAlias = (
    Assign
    | Fence
    | WorkerIsLost
    | ParameterServerUnreachable
    | ParameterServerBack
    | ParameterServerIsLost
)


# --- the rule --------------------------------------------------------------------------------


class _Task:
    """What is known of one task."""

    __slots__ = ("address", "boot", "deadline", "fenced_below", "incarnation", "is_ps", "state")

    def __init__(self, address: str, *, is_ps: bool) -> None:
        self.address = address
        self.is_ps = is_ps
        self.state = TaskState.CONNECTING
        self.boot: int | None = None  # boot incarnation of the latest connection
        self.incarnation = -1  # last assigned; -1 before the first
        self.fenced_below = 0  # incarnations of a worker that are refused; 0: none was lost
        self.deadline = 0.0  # of an unreachable ps: the time at which it is given up


class Membership:
    """The tasks of one cluster. Names are those of the cluster, as in ``/job:ps/task:0``.

    Args:
        workers: Address of every worker, by its name.
        ps: Address of every ps, by its name.
        ps_timeout_s: Seconds that a ps may be unreachable before its shards are given up.
    """

    def __init__(
        self,
        workers: Mapping[str, str],
        ps: Mapping[str, str],
        *,
        ps_timeout_s: float = PS_TIMEOUT_S,
    ) -> None:
        self._ps_timeout_s = ps_timeout_s
        self._tasks = {name: _Task(address, is_ps=True) for name, address in ps.items()}
        self._tasks |= {name: _Task(address, is_ps=False) for name, address in workers.items()}

    def __repr__(self) -> str:
        tasks = ", ".join(f"{name} {task.state.value}" for name, task in self._tasks.items())
        return f"<Membership: {tasks}>"

    def add_worker(self, task: str, address: str) -> None:
        """A worker belongs to the cluster from now on: one that is new, or that has left.

        Raises:
            LocalProtocolError: If it belongs to it already.
        """
        record = self._tasks.get(task)
        if record is None:
            self._tasks[task] = _Task(address, is_ps=False)
            return
        self._move(task, record, TaskEvent.ADD)
        record.address = address

    def connected(self, task: str, boot_incarnation: int) -> list[Action]:
        """A connection to the task was made, whose handshake gave its boot incarnation.

        Raises:
            LocalProtocolError: If the task is unknown or already connected.
        """
        record = self._record(task)
        was = record.state
        self._move(task, record, TaskEvent.CONNECT)
        same_life = record.boot == boot_incarnation
        record.boot = boot_incarnation
        record.incarnation = max(boot_incarnation, record.incarnation + 1)
        actions: list[Action] = [Assign(task, record.incarnation)]
        if record.is_ps:
            actions += [
                Fence(task, name, other.fenced_below)
                for name, other in self._tasks.items()
                if other.fenced_below
            ]
            if was is not TaskState.CONNECTING and same_life:
                actions.append(ParameterServerBack(task))
            elif was is TaskState.UNREACHABLE:
                actions.append(ParameterServerIsLost(task))
        return actions

    def disconnected(self, task: str, now: float) -> list[Action]:
        """The connection to the task ended.

        Args:
            task: Name of the task.
            now: The time, in seconds, on the clock that ``tick`` is given.

        Raises:
            LocalProtocolError: If the task is unknown or not connected.
        """
        record = self._record(task)
        if record.is_ps:
            self._move(task, record, TaskEvent.LOSE_PS)
            record.deadline = now + self._ps_timeout_s
            return [ParameterServerUnreachable(task)]
        self._move(task, record, TaskEvent.LOSE_WORKER)
        return self._gone(task, record)

    def left(self, worker: str) -> list[Action]:
        """A worker has left in order, or is not wanted any more.

        Raises:
            LocalProtocolError: If it is unknown, or a ps.
        """
        record = self._record(worker)
        if record.is_ps:
            raise LocalProtocolError(f"{worker} cannot leave: it holds variables")
        was_alive = record.state is TaskState.ALIVE
        self._move(worker, record, TaskEvent.LEAVE)
        return self._gone(worker, record) if was_alive else []

    def _gone(self, worker: str, record: _Task) -> list[Action]:
        """Fence a worker whose connection has ended."""
        record.fenced_below = record.incarnation + 1
        actions: list[Action] = [
            Fence(name, worker, record.fenced_below)
            for name, other in self._tasks.items()
            if other.is_ps and other.state is TaskState.ALIVE
        ]
        actions.append(WorkerIsLost(worker, record.incarnation))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Give up each ps that has been unreachable for too long by the time ``now``."""
        actions: list[Action] = []
        for name, record in self._tasks.items():
            if record.state is TaskState.UNREACHABLE and now >= record.deadline:
                self._move(name, record, TaskEvent.TIME_OUT)
                actions.append(ParameterServerIsLost(name))
        return actions

    def next_deadline(self) -> float | None:
        """Return the time at which ``tick`` has something to do, or None."""
        return min(
            (r.deadline for r in self._tasks.values() if r.state is TaskState.UNREACHABLE),
            default=None,
        )

    def state(self, task: str) -> TaskState:
        """Return the state of a task of the cluster."""
        return self._record(task).state

    def incarnation(self, task: str) -> int:
        """Return the incarnation that a task was last assigned; -1 if it never connected."""
        return self._record(task).incarnation

    def fences(self) -> list[tuple[str, int]]:
        """Return (task, lowest incarnation that may be served) of each worker that was lost."""
        return [
            (name, record.fenced_below)
            for name, record in self._tasks.items()
            if record.fenced_below
        ]

    def alive_workers(self) -> list[str]:
        """Return the names of the workers that are connected, in the order of the cluster."""
        return [
            name
            for name, record in self._tasks.items()
            if not record.is_ps and record.state is TaskState.ALIVE
        ]

    def ready(self, min_workers: int) -> bool:
        """Whether every ps and at least ``min_workers`` workers are connected."""
        every_ps = all(r.state is TaskState.ALIVE for r in self._tasks.values() if r.is_ps)
        return every_ps and len(self.alive_workers()) >= min_workers

    def missing(self) -> list[tuple[str, str]]:
        """Return (name, address) of every task that is waited for, ps tasks first."""
        return [
            (name, record.address)
            for name, record in self._tasks.items()
            if record.state not in (TaskState.ALIVE, TaskState.LEFT)
        ]

    def gone(self) -> list[str]:
        """Return the names of the workers that have left and are not back."""
        return [name for name, record in self._tasks.items() if record.state is TaskState.LEFT]

    def _record(self, task: str) -> _Task:
        try:
            return self._tasks[task]
        except KeyError:
            raise LocalProtocolError(f"{task} is not a task of the cluster") from None

    def _move(self, name: str, record: _Task, event: TaskEvent) -> None:
        try:
            record.state = MOVES[record.state][event]
        except KeyError:
            raise LocalProtocolError(
                f"{name} cannot {event.value}: it is {record.state.value}"
            ) from None


def backoff(attempt: int, uniform: float) -> float:
    """Return how long to wait before connecting again, in seconds: exponential, with jitter.

    The second half of the wait is random, so that tasks which lost the same peer spread out.

    Args:
        attempt: Number of attempts that have failed before, from 0.
        uniform: A random number in [0, 1).

    Returns:
        Between 0.02 and 0.04 s at first, a factor of 1.6 more each time, and at most 5 s.
    """
    # Far beyond the cap already; a power of any attempt would overflow.
    longest = min(BACKOFF_MAX_S, 2 * BACKOFF_MIN_S * BACKOFF_FACTOR ** min(attempt, 64))
    return longest * (1 + uniform) / 2
