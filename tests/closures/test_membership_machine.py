"""Membership and flapping as a supervisor drives them, in every order that hypothesis finds.

Workers come, are lost, leave, are removed and added again. Nobody is attached while it is set
aside, nobody is set aside for ever, and the last one is not at all.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psync.closures.membership import ALONE_S, LONGEST_S, Flapping, Membership, TaskState
from psync.wire.messages import Fence

WORKERS = tuple(f"/job:worker/task:{index}" for index in range(4))
DESCRIBED = WORKERS[:2]


class MembershipMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(dict.fromkeys(DESCRIBED, "w:1"))
        self.flapping = Flapping()
        self.flapping.is_anyone_there = lambda: bool(self.attached)
        self.now = 0.0
        self.known = set(DESCRIBED)  # belong to the cluster
        self.attached: set[str] = set()
        self.left: set[str] = set()  # of those known, who left in order and is not back
        self.boots = dict.fromkeys(WORKERS, 0)
        self.assigned: dict[str, list[int]] = {task: [] for task in WORKERS}
        self.over: dict[str, int] = {}  # the highest incarnation of each worker that is over
        self.refused: dict[str, int] = {}  # by worker: below

    def connect(self, task: str) -> None:
        self.membership.connected(task, self.boots[task])
        self.assigned[task].append(self.membership.incarnation(task))

    def end(self, worker: str, fence: Fence | None) -> None:
        """A worker that was there has gone."""
        assert fence is not None
        assert fence.task == worker
        self.refused[worker] = fence.below
        self.over[worker] = self.membership.incarnation(worker)
        self.attached.discard(worker)

    @rule(seconds=st.sampled_from((0.1, 1.0, 30.0, 200.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # --- workers ---------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS), restarts=st.integers(0, 1))
    def attach(self, worker: str, restarts: int) -> None:
        if worker not in self.known or worker in self.attached:
            return
        if self.flapping.remaining(worker, self.now) > 0:
            return  # as the supervisor, which sleeps until then
        self.boots[worker] += restarts
        self.connect(worker)
        self.attached.add(worker)
        self.flapping.joined(worker, self.now)
        self.left.discard(worker)

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), times=st.integers(1, 5))
    def flap(self, data: st.DataObject, times: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.attached)))
        for _ in range(times):
            self.end(worker, self.membership.disconnected(worker))
            pause = self.flapping.lost(worker, self.now)
            assert pause <= LONGEST_S
            if pause:
                left = pause if self.attached else ALONE_S
                assert (worker, left) in [
                    (name, round(left, 6)) for name, left in self.flapping.set_aside(self.now)
                ]
                return
            self.connect(worker)
            self.attached.add(worker)

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def session_is_ended(self, data: st.DataObject) -> None:
        """By the coordinator: no loss that counts."""
        worker = data.draw(st.sampled_from(sorted(self.attached)))
        self.end(worker, self.membership.disconnected(worker))
        assert self.flapping.remaining(worker, self.now) == 0

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.attached)))
        self.end(worker, self.membership.left(worker))
        self.left.add(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def remove(self, worker: str) -> None:
        if worker in self.known:
            fence = self.membership.left(worker)
            if worker in self.attached:
                self.end(worker, fence)
            else:
                assert fence is None
            self.flapping.forget(worker)
            for names in (self.known, self.attached, self.left):
                names.discard(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def add(self, worker: str) -> None:
        if worker not in self.known:
            self.membership.add_worker(worker, "anew:1")
            self.known.add(worker)
            assert self.flapping.remaining(worker, self.now) == 0

    @rule()
    def whoever_is_set_aside_may_come_back(self) -> None:
        """All may be set aside at once, and then the first whose time is over comes back."""
        waiting = self.flapping.set_aside(self.now)
        if waiting:
            worker, seconds = waiting[0]
            self.now += seconds
            assert self.flapping.remaining(worker, self.now) < 1e-6
            self.now += 1e-6
            self.attach(worker, 0)
            assert worker in self.attached

    # --- what holds always -----------------------------------------------------------------------

    @invariant()
    def no_incarnation_is_used_twice(self) -> None:
        for numbers in self.assigned.values():
            assert numbers == sorted(set(numbers))

    @invariant()
    def what_is_over_is_refused_and_what_lives_is_not(self) -> None:
        assert dict(self.membership.fences()) == self.refused
        for worker, incarnation in self.over.items():
            assert self.refused[worker] > incarnation
        for worker in self.attached:
            assert self.refused.get(worker, 0) <= self.membership.incarnation(worker)

    @invariant()
    def those_are_waited_for_that_belong_to_the_cluster_and_have_not_left(self) -> None:
        missing = {task for task, _ in self.membership.missing()}
        assert missing == self.known - self.attached - self.left
        alive = {
            worker for worker in self.known if self.membership.state(worker) is TaskState.ALIVE
        }
        assert self.attached == alive
        assert self.left <= set(self.membership.gone())

    @invariant()
    def nobody_takes_part_who_is_set_aside(self) -> None:
        assert not self.attached & {worker for worker, _ in self.flapping.set_aside(self.now)}

    @invariant()
    def the_last_worker_that_can_be_reached_is_never_set_aside(self) -> None:
        """Whichever of the workers that are not there can be reached: it comes back at once."""
        if not self.attached:
            for worker in self.known:
                assert self.flapping.remaining(worker, self.now + ALONE_S) == 0


MembershipMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None
)
TestMembership = pytest.mark.promise("failures.all-workers")(MembershipMachine.TestCase)
