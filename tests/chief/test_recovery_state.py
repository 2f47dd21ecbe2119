"""What stands still during a recovery, and what ends when nothing can be recovered."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from psync.chief.recovery_state import RecoveryState
from psync.closures.closure import Closure
from psync.closures.dispatcher import Dispatch
from psync.closures.queue import Action, ClosureQueue
from psync.errors import FencedError, ParameterServerLost, WorkerLost

LOST = ParameterServerLost("/job:ps/task:0", "is away")


class Gangs(list[str]):
    """None of them runs, so it is false."""


class World:
    """A coordinator with one worker, to which nothing was sent yet."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.performed: list[Action] = []
        self.all_gone: WorkerLost | None = None
        self.queue = ClosureQueue()
        self.queue.worker_joined("w")
        self.links: Any = SimpleNamespace(
            workers=SimpleNamespace(
                end_sessions=lambda error: self.said.append("sessions end"),
                all_given_up=lambda: self.all_gone,
                given_up={"w": "has ended"},
            )
        )
        gangs: Any = Gangs()
        gangs.fail = lambda error: self.said.append("gangs end")
        reports: Any = SimpleNamespace(sessions_end=lambda: None, tell_all=lambda: None)
        self.state = RecoveryState(
            self.links, self.queue, gangs, reports, self.perform, lambda: self.said.append("told")
        )

    def perform(self, actions: Sequence[Action]) -> None:
        self.performed += actions

    def schedule(self) -> Closure:
        closure = Closure(self.queue.next_id, name="step")
        self.queue.schedule(closure)
        self.perform(self.queue.dispatch())
        return closure

    def was_sent(self) -> bool:
        return any(isinstance(action, Dispatch) for action in self.performed)


def test_closures_stand_still_during_a_rollback_and_go_on_when_ps_tasks_were_told_again():
    world = World()
    world.state.rollback_began()
    world.schedule()
    assert not world.was_sent()
    world.state.on_recovered = lambda: world.said.append("backups")
    world.state.recovered()
    assert world.said == ["gangs end", "sessions end", "told", "backups"]
    assert world.was_sent()


def test_sessions_go_on_while_a_backup_is_promoted():
    world = World()
    world.state.failover_began()
    assert world.said == ["gangs end"]


def test_what_is_scheduled_after_a_loss_has_its_end():
    world = World()
    world.state.rollback_began()
    world.state.failed(LOST)
    world.queue.collect_error()
    assert not world.queue.has_failed
    world.schedule()
    world.state.fail_if_gone()
    assert world.queue.pending_errors == (LOST,)


def test_a_newer_coordinator_is_the_reason_even_after_a_loss_and_the_first_one_counts():
    world = World()
    first = FencedError("a newer one")
    world.state.failed(LOST)
    world.links.on_replaced(first)
    world.links.on_replaced(FencedError("the newest one"))
    world.queue.collect_error()
    world.schedule()
    world.state.fail_if_gone()
    assert world.queue.pending_errors == (first,)


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_what_is_scheduled_ends_where_no_worker_may_come_again(is_scheduled: bool):
    world = World()
    world.all_gone = WorkerLost("w", "has ended")
    if is_scheduled:
        world.schedule()
    world.links.on_worker_given_up()
    assert world.queue.has_failed == is_scheduled


def test_a_report_says_that_closures_stand_still_as_long_as_they_do() -> None:
    world = World()
    assert world.state.describe() == []
    world.state.rollback_began()
    assert world.state.describe() == ["closures are held back: a ps is being recovered"]
    world.state.recovered()
    assert world.state.describe() == []
