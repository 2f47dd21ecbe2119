"""Ps 0 and its backup: equal after every entry of the log, whatever is said of steps, and when.

The machine plays workers whose answers are lost, a coordinator, a clock, cuts, and a ps 0 that dies
after any entry. Gradients are one, and summed: so the variable says how many pushes were applied.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from backup_by_hand import BackupByHand
from ps_by_hand import COORDINATOR, PsByHand, group_config
from psync.errors import NotEnoughReplicas
from psync.net.peer import Later, Reply
from psync.wire.ps_messages import Fence, FinalBelow
from psync.wire.sync_messages import (
    Contribute,
    Contributed,
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
    answer: Later | None = None  # where the answer comes; None: the request is not there

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
            if isinstance(part, Later):
                self.ship()
            if worker.request is None:  # it was answered meanwhile
                return
        assert worker.request is not None
        segments = () if worker.request.set_id < 0 else (ONES,)
        answer = self.ps.begin(worker.client, worker.request, *segments)
        if isinstance(answer, asyncio.Task):  # the set is new to the connection
            self.turns.settle()
            answer = answer.result()
        assert isinstance(answer, Later)
        worker.answer = answer
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


def pair(turns: Turns, **more: Any) -> World:
    """A group of two, on ps 0 with a backup."""
    world = World(turns, **more)
    world.back_up()
    return world


@pytest.mark.parametrize("had", range(5))
@pytest.mark.parametrize("executed", [True, False])
def test_a_step_that_was_closing_when_ps_0_died_is_closed_once(
    turns: Turns, had: int, *, executed: bool
) -> None:
    """Whichever of its entries the backup had, and whether ps 0 knew that."""
    world = pair(turns)
    one, two = world.workers[:2]
    world.push(one)
    world.push(two)  # then: CountPush, CountPush, CloseStep, StepApplied
    if executed:
        world.ship(had)
        world.die()
    else:
        world.ship(max(had - 2, 0))
        world.die(ahead=min(had, 2))
    for worker in (one, two):
        if worker.request is not None:
            world.send(worker)
    assert (world.accepted, one.token, two.token) == (2, 1, 1)
    assert (world.counted(), world.ps.value(world.step)) == (2, 1)
    world.push(one)
    world.push(two)
    assert (world.counted(), world.ps.value(world.step)) == (4, 2)
    world.end()


def test_a_step_that_was_decided_in_a_pause_is_outgoing_on_a_backup_made_then(
    turns: Turns,
) -> None:
    world = World(turns)
    world.cut()
    for worker in world.workers[:2]:
        world.push(worker)
    world.back_up()
    world.die()
    assert (world.counted(), world.ps.value(world.step)) == (2, 1)
    for worker in world.workers[:2]:
        world.send(worker)
    assert world.accepted == 2
    world.end()


def test_a_pause_that_ends_while_a_step_is_on_its_way_carries_it_no_second_time(
    turns: Turns,
) -> None:
    world = pair(turns)
    for worker in world.workers[:2]:
        world.push(worker)
    world.ship(2)  # the closing is in the log, and no further
    world.cut()
    world.resume()
    world.ship()
    assert world.accepted == 2
    assert (world.counted(), world.ps.value(world.step)) == (2, 1)
    world.end()


def test_who_waits_for_others_waits_no_longer_because_ps_0_died(turns: Turns) -> None:
    """The promoted backup's clock goes on from where that of ps 0 was."""
    turns.advance(1000.0)
    world = World(turns, min_replicas=2, patience_s=5.0)
    world.report([0])
    world.push(world.workers[0])
    turns.advance(2.0)
    world.back_up()
    world.die()
    world.send(world.workers[0])
    turns.advance(2.9)
    world.hear()
    assert not world.unknown
    turns.advance(2.2)  # of the two seconds before the last entry the log does not know
    world.hear()
    assert world.unknown == 1
    world.end()


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.turns, self.patch = Turns(), pytest.MonkeyPatch()
        self.patch.setattr(asyncio, "get_running_loop", lambda: self.turns)

    @initialize(
        needed=st.integers(1, 3),
        total=st.integers(1, WORKERS),
        mode=st.sampled_from(["free", "strict", "tensorflow_compat"]),
        fewest=st.integers(1, 2),
    )
    def begin(self, needed: int, total: int, mode: str, fewest: int) -> None:
        more: dict[str, Any] = {} if mode == "free" else {mode: True}
        self.world = World(
            self.turns, replicas_to_aggregate=needed, total_num_replicas=total,
            min_replicas=min(fewest, total), patience_s=5.0, **more,
        )  # fmt: skip
        self.closures = 0
        self.lost: list[int] = []  # closures whose worker was lost
        self.finals = 0

    @rule(index=st.integers(0, WORKERS - 1), staged=st.booleans(), again=st.booleans())
    def push(self, index: int, staged: bool, again: bool) -> None:
        worker = self.world.workers[index]
        if worker.request is not None:
            if again:
                self.world.send(worker)
            return
        if self.lost:
            closure = self.lost.pop()
        else:
            closure, self.closures = self.closures, self.closures + 1
        self.world.push(worker, staged=staged, closure=closure)

    @rule(index=st.integers(0, WORKERS - 1))
    def give_up(self, index: int) -> None:
        """A connection is lost."""
        worker = self.world.workers[index]
        if worker.answer is not None:
            worker.answer.give_up()
            worker.answer = None

    @rule(index=st.integers(0, WORKERS - 1))
    def fence(self, index: int) -> None:
        request = self.world.workers[index].request
        if request is not None:
            self.lost.append(request.closure)
        self.world.fence(self.world.workers[index])

    @rule(alive=st.sets(st.integers(0, WORKERS - 1)), queued=st.booleans())
    def report(self, alive: set[int], queued: bool) -> None:
        self.world.report(sorted(alive), queued=queued)

    @rule()
    def final_below(self) -> None:
        held = [each.request.closure for each in self.world.workers if each.request is not None]
        below = min([*held, *self.lost, self.closures])
        self.world.ps.begin(COORDINATOR, FinalBelow(below))

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.turns.advance(seconds)
        self.world.hear()

    @rule(entries=st.sampled_from([1, 2, 1000]))
    def ship(self, entries: int) -> None:
        self.world.ship(entries)

    @rule()
    def back_up(self) -> None:
        self.world.back_up()

    @precondition(lambda self: self.world.backup is not None)
    @rule(ahead=st.integers(0, 3))
    def die(self, ahead: int) -> None:
        self.world.die(ahead)

    @precondition(lambda self: not self.world.is_cut)
    @rule()
    def cut(self) -> None:
        self.world.cut()

    @precondition(lambda self: self.world.is_cut)
    @rule()
    def resume(self) -> None:
        self.world.resume()

    @invariant()
    def what_was_accepted_counts_once(self) -> None:
        world = self.world
        open_pushes = len(world.ps.services.closer.steps.pending())
        assert world.accepted <= world.counted() + open_pushes
        assert world.counted() <= world.sent

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.world.settle()
                counted = self.world.counted()
                assert self.world.accepted <= counted <= self.world.accepted + self.world.unknown
                (group,) = self.world.ps.services.statistics()["sync"].values()
                assert self.world.ps.value(self.world.step) == group["steps"] == group["step"]
                self.world.end()
        finally:
            self.patch.undo()


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
