"""The killer of a chaos run: victims and times drawn from a seed, with exponential pauses.

The rule of whom it leaves alone, because a kill would teach nothing:

- a task that is not there, or a worker that has not pushed anything in its present life;
- a ps or the chief, as long as training has not gone on since the last kill of a ps or of the
  chief: whoever restores has to get to the end of it once. Workers are killed meanwhile;
- a task that it has stopped, until it goes on.

A worker that gets SIGTERM leaves for good, as the launcher sees it: two always stay, and where no
other is left SIGKILL is sent instead. It waits until the task that it has drawn may be killed, and
passes it over after a while.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from psync.testing.chaos.evidence import PushMarks, Victim, in_flight, read_journal, victims_of

LOOK_EVERY_S = 0.02
PATIENCE_S = 10.0  # then another task is drawn
LONGEST_STOP_S = 6.0
STAY = 2
"""Workers that are never asked to leave."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Something that was done to a task."""

    at_s: float  # since the killer began
    task: str
    signal: str
    in_flight: int  # workers whose push was under way at that moment

    @property
    def job(self) -> str:
        """Of the task."""
        return self.task.partition("-")[0]


@dataclass(frozen=True)
class KillPlan:
    """How often what happens to whom.

    Attributes:
        jobs: Share of each job.
        signals: Of each job, how the shares of the signals are.
        pause_s: Mean seconds between two.
        stop_s: Mean seconds for which a task is stopped.
    """

    jobs: Mapping[str, float] = field(
        default_factory=lambda: {"worker": 0.62, "ps": 0.28, "chief": 0.1}
    )
    signals: Mapping[str, Mapping[str, float]] = field(
        default_factory=lambda: {
            "worker": {"SIGKILL": 0.6, "SIGTERM": 0.2, "SIGSTOP": 0.2},
            "ps": {"SIGKILL": 0.6, "SIGTERM": 0.2, "SIGSTOP": 0.2},
            "chief": {"SIGKILL": 0.7, "SIGSTOP": 0.3},
        }
    )
    pause_s: float = 1.5
    stop_s: float = 1.5


class Killer:
    """Kills tasks of one run.

    Args:
        launcher: Process id of ``psync run``.
        directory: Of the run: its journal and marks are there.
        tasks: How many there are of each job.
        plan: What is drawn.
        rng: What draws.

    Attributes:
        kills: What was done.
        passed_over: How often nobody could be killed in time.
    """

    def __init__(
        self,
        launcher: int,
        directory: Path,
        tasks: Mapping[str, int],
        plan: KillPlan,
        rng: random.Random,
    ) -> None:
        self.kills: list[Kill] = []
        self.passed_over = 0
        self._launcher = launcher
        self._directory = directory
        self._tasks = tasks
        self._plan = plan
        self._rng = rng
        self._marks = PushMarks(directory / "marks")
        self._stopped: dict[str, Victim] = {}
        self._left: set[int] = set()  # workers that were asked to leave
        self._began = time.monotonic()
        self._done_at_kill = 0  # lines of the journal at the last kill of a ps or the chief

    async def run(self, seconds: float) -> None:
        """Kill for so long; at the end everybody who was stopped goes on.

        Cancellation: Likewise.
        """
        await self._all_up()
        self._began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as stops:
                while True:
                    await asyncio.sleep(self._rng.expovariate(1 / self._plan.pause_s))
                    if time.monotonic() - self._began > seconds:
                        return
                    await self._strike(stops)
        finally:
            for victim in self._stopped.values():
                victim.send(signal.SIGCONT)
            self._marks.close()

    async def _all_up(self) -> None:
        """Wait until every task is there and training has begun."""
        wanted = {(job, index) for job, count in self._tasks.items() for index in range(count)}
        while not (wanted <= victims_of(self._launcher).keys() and self._progress()):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)

    async def _strike(self, stops: asyncio.TaskGroup) -> None:
        job = self._drawn(self._plan.jobs)
        index = self._rng.choice(self._staying(job))
        name = self._drawn(self._plan.signals[job])
        if job == "worker" and name == "SIGTERM" and len(self._staying(job)) <= STAY:
            name = "SIGKILL"
        deadline = time.monotonic() + PATIENCE_S
        while (victim := self._ready(job, index)) is None:
            if time.monotonic() > deadline:
                self.passed_over += 1
                return
            await asyncio.sleep(LOOK_EVERY_S)
        signum = signal.Signals[name]
        alive = {
            other.index: other.pid
            for other in victims_of(self._launcher).values()
            if other.job == "worker"
        }
        before = self._marks.snapshot(self._tasks["worker"])
        if not victim.send(signum):
            return
        busy = in_flight(before, self._marks.snapshot(self._tasks["worker"]), alive)
        count = len(busy) if job != "worker" else int(index in busy)
        at_s = round(time.monotonic() - self._began, 3)
        self.kills.append(Kill(at_s, victim.name, name, count))
        if signum == signal.SIGSTOP:
            seconds = min(LONGEST_STOP_S, self._rng.expovariate(1 / self._plan.stop_s))
            self._stopped[victim.name] = victim
            stops.create_task(self._go_on(victim, seconds))
        elif job == "worker":
            self._left |= {index} if signum == signal.SIGTERM else set()
        else:
            self._done_at_kill = self._progress()

    async def _go_on(self, victim: Victim, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            victim.send(signal.SIGCONT)
            self._stopped.pop(victim.name, None)

    def _ready(self, job: str, index: int) -> Victim | None:
        """Return whom to kill, unless the rule says that it is too early."""
        victim = victims_of(self._launcher).get((job, index))
        if victim is None or victim.name in self._stopped:
            return None
        if job == "worker":
            slot = self._marks.snapshot(self._tasks["worker"]).get(index)
            return victim if slot is not None and slot[0] == victim.pid else None
        return victim if self._progress() > self._done_at_kill else None

    def _staying(self, job: str) -> list[int]:
        """Return the tasks of a job that are there, or come back."""
        left = self._left if job == "worker" else ()
        return [index for index in range(self._tasks[job]) if index not in left]

    def _progress(self) -> int:
        """Return how many lines say that closures are done."""
        return sum(line["kind"] == "done" for line in read_journal(self._directory))

    def _drawn(self, shares: Mapping[str, float]) -> str:
        names: Sequence[str] = sorted(shares)
        return self._rng.choices(names, [shares[name] for name in names])[0]
