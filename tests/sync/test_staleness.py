"""Who waits for whom, and that somebody always goes on."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psync.sync.staleness import Release, RoundClocks, Tick

A, B, C = "/job:worker/task:0", "/job:worker/task:1", "/job:worker/task:2"
BORN = 100


class Workers:
    """Workers that do rounds, each as it may."""

    def __init__(self, max_staleness: int, tasks: Iterable[str] = (A, B)) -> None:
        self.clocks = RoundClocks(max_staleness)
        self.alive = dict.fromkeys(tasks, BORN)
        self.clocks.members(self.alive, None)
        self.numbers: dict[str, int] = {}

    def tick(self, task: str) -> list[str]:
        """One more round; return who may go on, in which order."""
        number = self.numbers[task] = self.numbers.get(task, 0) + 1
        return names(self.clocks.tick(task, BORN, number))

    def members(self, alive: Iterable[str], busy: Iterable[str] | None = None) -> list[str]:
        self.alive = dict.fromkeys(alive, BORN)
        return names(self.clocks.members(self.alive, None if busy is None else set(busy)))

    def elsewhere(self, *tasks: str) -> list[str]:
        return names(self.clocks.elsewhere({(task, BORN) for task in tasks}))

    def values(self) -> dict[str, int]:
        return self.clocks.statistics()["clocks"]


def names(releases: Iterable[Release]) -> list[str]:
    return [release.tick.task for release in releases]


# --- the bound -------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2, 7])
def test_a_worker_runs_ahead_up_to_the_bound(bound):
    workers = Workers(bound)
    for _ in range(bound):
        assert workers.tick(A) == [A]
    assert workers.tick(A) == []
    assert workers.tick(B) == [B, A]
    assert workers.tick(A) == []


def test_how_far_a_worker_is_ahead_is_said():
    clocks = Workers(2).clocks
    assert clocks.tick(A, BORN, 1) == [Release(Tick(A, BORN, 1), 1)]
    assert clocks.tick(A, BORN, 2) == [Release(Tick(A, BORN, 2), 2)]
    assert clocks.tick(A, BORN, 3) == []
    assert clocks.tick(B, BORN, 1) == [
        Release(Tick(B, BORN, 1), 0), Release(Tick(A, BORN, 3), 2),
    ]  # fmt: skip


# --- repetitions -----------------------------------------------------------------------------


def test_a_tick_that_is_repeated_counts_once():
    workers = Workers(1)
    workers.tick(A)
    assert names(workers.clocks.tick(A, BORN, 1)) == [A]
    assert workers.values() == {A: 1, B: 0}
    assert workers.tick(A) == []
    assert workers.clocks.tick(A, BORN, 2) == []  # goes on waiting
    assert workers.tick(B) == [B, A]
    assert names(workers.clocks.tick(A, BORN, 2)) == [A]
    statistics = workers.clocks.statistics()
    assert (statistics["ticks"], statistics["waits"], statistics["waiting"]) == (3, 1, 0)


# --- who has work ----------------------------------------------------------------------------


def test_a_worker_that_joins_starts_at_the_slowest():
    workers = Workers(3)
    for task in (A, A, B, A):
        workers.tick(task)
    workers.members((A, B, C))
    assert workers.values() == {A: 3, B: 1, C: 1}


def test_its_next_incarnation_starts_at_the_slowest():
    workers = Workers(1)
    for task in (A, B, A):
        workers.tick(task)
    assert workers.clocks.tick(A, BORN, 3) == []
    released = workers.clocks.members({A: BORN, B: BORN + 1}, None)
    assert workers.values() == {A: 3, B: 3}
    assert names(released) == [A]
    assert names(workers.clocks.tick(B, BORN + 1, 1)) == [B]
    assert workers.values() == {A: 3, B: 4}


def test_a_worker_without_work_is_not_waited_for():
    workers = Workers(0, (A, B))
    workers.tick(A)
    assert workers.members((A, B), busy=(A,)) == [A]
    assert workers.tick(A) == [A]
    workers.members((A, B))
    assert workers.values() == {A: 2, B: 2}  # and is not behind when it comes back


def test_rounds_done_alone_are_not_waited_for():
    workers = Workers(2)
    workers.members((A, B), busy=(A,))
    for _ in range(9):
        workers.tick(A)
    workers.members((A, B), busy=())
    workers.members((A, B), busy=(B,))
    assert workers.values() == {B: 9}


# --- strangers -------------------------------------------------------------------------------


def test_a_stranger_waits_for_others_and_nobody_for_it():
    workers = Workers(1)
    assert names(workers.clocks.tick(C, BORN, 1)) == [C]
    assert workers.clocks.tick(C, BORN, 2) == []
    assert workers.tick(A) == [A]
    assert workers.tick(B) == [B, C]
    assert workers.values() == {A: 1, B: 1}
    workers.members((A, B, C))
    assert workers.values() == {A: 1, B: 1, C: 2}


def test_a_stranger_whose_first_rounds_nobody_saw_starts_at_the_slowest():
    workers = Workers(1)
    for task in (A, B, A, B):
        workers.tick(task)
    assert workers.clocks.tick(C, BORN, 41) == [Release(Tick(C, BORN, 41), 1)]
    workers.members((A, B, C))
    assert workers.values() == {A: 2, B: 2, C: 3}


def test_among_strangers_only_nobody_waits_and_none_is_behind_afterwards():
    clocks = RoundClocks(0)
    for number in range(1, 6):
        assert names(clocks.tick(A, BORN, number)) == [A]
    assert names(clocks.tick(B, BORN, 1)) == [B]
    clocks.members({A: BORN, B: BORN}, None)
    assert set(clocks.statistics()["clocks"].values()) == {6}


def test_a_stranger_that_is_older_than_the_living_one_is_forgotten():
    workers = Workers(0)
    assert workers.clocks.tick(A, BORN - 1, 5) == []
    workers.tick(A)
    assert names(workers.clocks.members({A: BORN, B: BORN}, None)) == []
    assert sorted(workers.tick(B)) == [A, A, B]


# --- ends ------------------------------------------------------------------------------------


def test_who_is_cancelled_is_not_released_but_its_round_is_done():
    workers = Workers(0, (A, B, C))
    workers.tick(A)
    workers.tick(C)
    assert workers.clocks.waiting == {(A, BORN), (C, BORN)}
    workers.clocks.cancel(Tick(A, BORN, 1))
    assert workers.tick(B) == [C, B]
    assert workers.values() == {A: 1, B: 1, C: 1}


def test_the_end_releases_everybody_for_ever():
    workers = Workers(0, (A, B, C))
    workers.tick(A)
    workers.tick(B)
    assert names(workers.clocks.end()) == [A, B]
    assert workers.tick(A) == [A]
    assert workers.tick(A) == [A]


# --- who waits elsewhere ---------------------------------------------------------------------


def test_a_worker_that_waited_elsewhere_keeps_its_clock_and_the_others_wait_for_it_again():
    workers = Workers(1)
    workers.elsewhere(B)
    assert [workers.tick(A) for _ in range(3)] == [[A]] * 3
    workers.elsewhere()
    assert workers.values() == {A: 3, B: 0}
    assert workers.tick(A) == []
    assert [workers.tick(B) for _ in range(3)] == [[B], [B], [B, A]]


def test_where_all_others_wait_elsewhere_who_comes_does_not_start_ahead_of_them():
    workers = Workers(0)
    workers.elsewhere(B)
    workers.tick(A)
    workers.elsewhere(A, B)
    workers.members([A, B, C])
    assert workers.values() == {A: 1, B: 0, C: 0}


# --- in every order --------------------------------------------------------------------------

TASKS = [f"/job:worker/task:{index}" for index in range(4)]
some_tasks = st.lists(st.sampled_from(TASKS), unique=True)


class Machine(RuleBasedStateMachine):
    """Workers that do rounds, die, idle and come back while reports about them come late or never.

    One whose wait was cancelled goes on without leave: the others must not suffer from it.
    """

    @initialize(bound=st.integers(0, 3))
    def begin(self, bound):
        self.bound = bound
        self.clocks = RoundClocks(bound)
        self.truth = dict.fromkeys(TASKS, BORN)  # incarnations as they are
        self.working: set[tuple[str, int]] = set()  # as reported
        self.numbers: dict[tuple[str, int], int] = {}
        self.waiting: dict[tuple[str, int], Tick] = {}
        self.cancelled: set[Tick] = set()
        self.elsewhere: set[tuple[str, int]] = set()

    def released(self, releases: list[Release]) -> None:
        for release in releases:
            replica = release.tick[:2]
            assert release.ahead >= 0
            if self.waiting.get(replica) == release.tick:
                del self.waiting[replica]

    @rule(task=st.sampled_from(TASKS))
    def do_a_round(self, task):
        replica = (task, self.truth[task])
        if replica not in self.waiting:
            number = self.numbers[replica] = self.numbers.get(replica, 0) + 1
            self.waiting[replica] = Tick(*replica, number)
            self.released(self.clocks.tick(*replica, number))

    @rule(task=st.sampled_from(TASKS), back=st.integers(0, 3))
    def repeat(self, task, back):
        replica = (task, self.truth[task])
        number = self.numbers.get(replica, 0) - back
        if number > 0:
            before = self.clocks.statistics()["ticks"]
            releases = self.clocks.tick(*replica, number)
            tick = Tick(*replica, number)
            if tick not in [release.tick for release in releases]:
                assert self.waiting.setdefault(replica, tick) == tick or tick in self.cancelled
            assert self.clocks.statistics()["ticks"] == before
            self.released(releases)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        replica = data.draw(st.sampled_from(sorted(self.waiting)))
        tick = self.waiting.pop(replica)
        self.clocks.cancel(tick)
        self.cancelled.add(tick)

    @rule(task=st.sampled_from(TASKS))
    def start_again(self, task):
        self.truth[task] += 1

    @rule(alive=some_tasks, busy=st.none() | some_tasks)
    def report(self, alive, busy):
        told = {task: self.truth[task] for task in alive}
        self.working = {(t, i) for t, i in told.items() if busy is None or t in busy}
        self.released(self.clocks.members(told, None if busy is None else set(busy)))

    @invariant()
    def somebody_always_goes_on(self):
        if counted := self.working - self.elsewhere:
            assert not counted <= self.waiting.keys()
        else:
            assert not self.waiting

    @invariant()
    def nobody_runs_further_ahead_than_the_bound(self):
        clocks = self.clocks.statistics()["clocks"]
        assert clocks.keys() == {task for task, _ in self.working}
        for replica in self.working - {tick[:2] for tick in self.cancelled}:
            ahead = clocks[replica[0]] - min(clocks.values())
            assert ahead <= self.bound + (replica in self.waiting)
            if replica in self.waiting:
                assert ahead > self.bound  # nobody waits without need


class MachineWithOthers(Machine):
    """Likewise; besides, workers wait elsewhere, and perhaps here at the same time."""

    @rule(tasks=some_tasks)
    def wait_elsewhere(self, tasks):
        self.elsewhere = {(task, self.truth[task]) for task in tasks}
        self.released(self.clocks.elsewhere(self.elsewhere))

    @invariant()
    def nobody_runs_further_ahead_than_the_bound(self):
        """Only of those that are waited for: the others may be behind when they come back."""
        clocks = self.clocks.statistics()["clocks"]
        counted = [clocks[task] for task, _ in self.working - self.elsewhere]
        for replica in self.working & self.waiting.keys():
            assert clocks[replica[0]] - min(counted) > self.bound  # nobody waits without need


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase

MachineWithOthers.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestMachineWithOthers = MachineWithOthers.TestCase
