"""Ps 0 by hand, alone or with a backup, and the workers of a synchronous group, for tests.

Gradients are one, and summed: so the variable says how many pushes were applied. Needs the fixture
``turns``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from asked import Asked, Reply
from backup_by_hand import BackupByHand
from ps_by_hand import COORDINATOR, PsByHand, group_config
from psync.errors import NotEnoughReplicas
from psync.wire.messages import (
    Contribute,
    Contributed,
    Fence,
    FinishSteps,
    InitTokens,
    ReportSchedule,
    StagePush,
)
from turns import Turns

GROUP = 9
RATE = 0.5
WORKERS = 3
SET = 5
ONES = np.ones(2, np.float32).tobytes()


@dataclass
class Worker:
    """A worker, and the push that it waits for."""

    task: str
    incarnation: int = 1000
    number: int = 0
    token: int = -1
    request: Contribute | None = None  # is not answered
    staged: StagePush | None = None  # its part, if that is staged before
    answer: Asked | None = None  # where the answer comes; None: the request is not there

    @property
    def client(self) -> tuple[str, int]:
        return self.task, self.incarnation


class World:
    """Ps 0, alone or with a backup, and the workers of a group.

    Args:
        turns: In place of a loop.
        more: Of the configuration of the group.
    """

    def __init__(self, turns: Turns, **more: Any) -> None:
        self.turns = turns
        self.ps = PsByHand(index=0, num_ps=1)
        self.backup: BackupByHand | None = None
        self.w = self.ps.create("w", np.zeros(2, np.float32))
        self.step = self.ps.create("step", np.array(0))
        self.config = group_config(reduction="sum", global_step=(0, *self.step), **more)
        self.workers = [Worker(f"/job:worker/task:{index}") for index in range(WORKERS)]
        self.accepted = 0
        self.unknown = 0  # pushes of which nobody will hear
        self.sent = 0  # pushes, each of which may count
        self.reports = 0
        self.is_cut = False
        self.pausing: list[asyncio.Task[None]] = []
        self.say(InitTokens(GROUP, self.config, -1))

    def say(self, message: Any) -> Any:
        """The coordinator says this; return what comes of it."""
        answer = self.ps.begin(COORDINATOR, message)
        self.turns.settle()
        return answer

    def counted(self) -> float:
        """How many pushes the variable has."""
        (both,) = set(self.ps.value(self.w).tolist())
        return -both / RATE

    # Workers.

    def push(self, worker: Worker, *, staged: bool = False, closure: int = -1) -> None:
        """A worker that waits for nothing pushes."""
        self.sent += 1
        worker.number += 1
        number, step = worker.number, worker.token
        members = None if staged else [(0, *self.w)]
        worker.request = Contribute(
            GROUP, self.config, number, number, closure, 0, b"w", step, 1.0,
            -1 if staged else SET, members, -1, None,
        )  # fmt: skip
        worker.staged = (
            StagePush(GROUP, self.config, number, step, SET, [self.w]) if staged else None
        )
        self.send(worker)

    def send(self, worker: Worker) -> None:
        """A worker sends its request, for the first time or again."""
        if worker.staged is not None:
            part = self.ps.begin(worker.client, worker.staged, ONES)
            if not part.done():
                self.ship()
            if worker.request is None:  # it was answered meanwhile
                return
        assert worker.request is not None
        segments = () if worker.request.set_id < 0 else (ONES,)
        worker.answer = self.ps.begin(worker.client, worker.request, *segments)
        if worker.answer.in_coroutine:  # the set is new to the connection
            self.turns.settle()
        self.hear()

    def hear(self) -> None:
        """Workers get the answers that have left."""
        for worker in self.workers:
            outcome = None if worker.answer is None else worker.answer.outcome
            if outcome is None:
                continue
            worker.answer = worker.request = None
            if isinstance(outcome, Reply):
                assert isinstance(outcome.message, Contributed)
                self.accepted += outcome.message.outcome == "accepted"
                worker.token = outcome.message.token
            else:
                assert isinstance(outcome, NotEnoughReplicas), outcome
                self.unknown += 1

    def fence(self, worker: Worker) -> None:
        """A worker is lost, and started again."""
        self.unknown += worker.request is not None
        worker.incarnation += 1
        worker.request = worker.answer = None
        worker.token, worker.number = -1, 0
        self.say(Fence(worker.task, worker.incarnation))

    def report(self, alive: list[int], *, queued: bool = True) -> None:
        """The coordinator says who takes part."""
        self.reports += 1
        members = [(index, self.workers[index].incarnation) for index in alive]
        self.say(ReportSchedule(self.reports, members, [], queued, []))

    # The backup.

    def back_up(self) -> None:
        """Make a new one."""
        self.backup = BackupByHand(self.ps)
        self.backup.check_equal()
        self.hear()

    def ship(self, entries: int = 1000) -> None:
        """Let the backup, if there is one, have so many entries, and be equal after each."""
        self.turns.settle()
        if self.backup is not None:
            self.backup.catch_up(entries)
        self.turns.settle()
        self.hear()

    def die(self, ahead: int = 0) -> None:
        """Ps 0 dies; its backup has so many entries that it has not executed."""
        assert self.backup is not None
        if ahead:
            self.backup.read_ahead(ahead)
        self.backup.promote()
        self.ps, self.backup, self.is_cut = self.backup, None, False
        for worker in self.workers:
            worker.answer = None
        self.turns.settle()

    # Cuts.

    def cut(self) -> None:
        """A cut begins: no step is carried."""
        self.is_cut = True
        self.pausing.append(self.turns.create_task(self.ps.services.pause("cut")))
        self.turns.settle()

    def resume(self) -> None:
        """The cut ends."""
        self.is_cut = False
        self.ps.services.resume("cut")
        self.hear()

    def settle(self) -> None:
        """Everybody asks again until all that was counted is applied, and everybody has heard."""
        if self.is_cut:
            self.resume()
        self.report([])
        for _ in range(10):
            for worker in self.workers:
                if worker.request is not None and worker.answer is None:
                    self.send(worker)
            self.ship()
            finishing = self.say(FinishSteps())
            self.ship()
            self.turns.advance(1000.0)  # whoever waits for others waits no more
            self.ship()
            assert finishing.done()
            if not any(worker.request for worker in self.workers):
                return
        raise AssertionError("somebody waits for ever")

    def end(self) -> None:
        for task in self.pausing:
            task.cancel()
        self.turns.settle()
        assert not self.turns.reports
