"""Who meets whom in a gang, and that nobody waits for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psync.closures.closure import Closure, Replica, State
from psync.closures.dispatcher import Dispatch
from psync.closures.gang import Gang
from psync.closures.membership import ScheduleReports
from psync.closures.queue import Cancel, ClosureQueue, Settle
from psync.errors import ClosureCancelled, EndOfData, RemoteProtocolError, UsageError, WorkerLost


class World:
    """A gang, the requests of its replicas, and what it has asked for."""

    def __init__(self, count: int) -> None:
        self.refused: list[tuple[int, Exception]] = []
        self.stopped: list[int] = []
        self.merging_stopped: list[bool] = []
        workers = [f"/job:worker/task:{index}" for index in range(count)]
        self.gang = Gang(workers, self.stopped.append, lambda: self.merging_stopped.append(True))

    def arrive(self, replica: int, what: str) -> int | None:
        def fail(error: Exception) -> None:
            self.refused.append((replica, error))

        return self.gang.arrive(replica, what, SimpleNamespace(replica=replica, fail=fail))

    def refusal(self) -> Exception:
        (error,) = {error for _, error in self.refused}
        return error


def gang_of(count: int) -> tuple[World, Gang]:
    world = World(count)
    return world, world.gang


# --- meeting ---------------------------------------------------------------------------------


def test_a_collective_is_merged_when_all_are_there_and_answered_to_all():
    world, gang = gang_of(3)
    assert world.arrive(0, "merge_call") is None
    assert world.arrive(2, "merge_call") is None
    assert [gang.waits(replica) for replica in range(3)] == [True, False, True]
    assert world.arrive(1, "merge_call") == 0
    assert [request.replica for request in gang.requests(0)] == [0, 1, 2]
    assert [request.replica for request in gang.merged(0)] == [0, 1, 2]
    assert not any(gang.waits(replica) for replica in range(3))
    assert world.arrive(1, "all_reduce SUM") is None
    assert gang.describe() == (
        "replica 1 on /job:worker/task:1 in all_reduce SUM, and not yet "
        "replica 0 on /job:worker/task:0, replica 2 on /job:worker/task:2"
    )


def test_a_replica_may_be_in_several_collectives_at_once():
    world, gang = gang_of(2)
    assert world.arrive(0, "a") is None
    assert world.arrive(0, "b") is None
    assert world.arrive(1, "a") == 0
    assert gang.describe().startswith("replica 0 on /job:worker/task:0 in b, and not yet")
    assert world.arrive(1, "b") == 1
    assert gang.describe() == "a is being computed"
    assert gang.merged(1)
    assert gang.waits(0)
    assert gang.merged(0)
    assert not gang.waits(0)
    assert gang.describe() == ""


def test_a_replica_that_returns_without_awaiting_a_collective_has_given_it_up():
    world, gang = gang_of(2)
    world.arrive(0, "merge_call")
    world.arrive(1, "merge_call")
    assert gang.merged(0)
    world.arrive(1, "all_reduce SUM")
    world.arrive(0, "all_reduce SUM")
    gang.finished(0)
    assert world.merging_stopped == [True]
    assert dict(world.refused) == dict.fromkeys((0, 1), gang.error)
    assert "replica 0 on /job:worker/task:0 gave up all_reduce SUM" in str(gang.error)


# --- not meeting -----------------------------------------------------------------------------


def test_different_collectives_are_an_error_for_all():
    world, gang = gang_of(3)
    world.arrive(0, "merge_call")
    world.arrive(1, "all_reduce SUM")
    error = world.refusal()
    assert [replica for replica, _ in world.refused] == [0, 1]
    assert isinstance(error, UsageError)
    assert str(error).startswith(
        "different collectives: replica 0 on /job:worker/task:0 is in merge_call, "
        "replica 1 on /job:worker/task:1 in all_reduce SUM\nhint: "
    )
    assert world.stopped == [2]
    assert gang.error is error
    assert not gang.has_ended
    assert world.arrive(2, "merge_call") is None
    assert world.refused[2:] == [(2, error)]


@pytest.mark.parametrize("returns_first", [True, False])
def test_different_numbers_of_collectives_are_an_error_for_all(returns_first):
    world, gang = gang_of(2)
    world.arrive(0, "merge_call")
    world.arrive(1, "merge_call")
    gang.merged(0)
    if returns_first:
        gang.finished(0)
    world.arrive(1, "all_reduce SUM")
    if not returns_first:
        gang.finished(0)
    ((replica, error),) = world.refused
    assert replica == 1
    assert isinstance(error, UsageError)
    assert error.message == (
        "different numbers of collectives: replica 0 on /job:worker/task:0 returned after 1, "
        "replica 1 on /job:worker/task:1 is in its number 2, all_reduce SUM"
    )
    gang.failed(1, error)
    assert gang.has_ended
    assert gang.error is error


def test_a_replica_that_fails_is_named_to_those_who_wait_and_the_others_are_stopped():
    world, gang = gang_of(3)
    world.arrive(0, "merge_call")
    boom = ValueError("boom")
    gang.failed(1, boom)
    assert gang.error is boom
    assert [replica for replica, _ in world.refused] == [0]
    assert str(world.refusal()) == "replica 1 on /job:worker/task:1 failed: ValueError: boom"
    assert world.stopped == [2]
    gang.failed(0, world.refusal())
    assert not gang.has_ended
    gang.finished(2)
    assert gang.has_ended
    assert gang.error is boom


@pytest.mark.parametrize(
    ("error", "cls", "text"),
    [
        (WorkerLost("/job:worker/task:1"), WorkerLost, "task:1 was lost with replica 1"),
        (EndOfData("no more"), ClosureCancelled, "task:1 met the end of its data"),
        (KeyError(), ClosureCancelled, "task:1 failed: KeyError"),
    ],
)
def test_how_a_replica_ended_is_told(error, cls, text):
    world, gang = gang_of(2)
    world.arrive(0, "merge_call")
    gang.failed(1, error)
    assert type(world.refusal()) is cls
    assert text in str(world.refusal())
    assert gang.error is error


def test_a_replica_that_gives_up_ends_the_gang():
    world, gang = gang_of(2)
    world.arrive(0, "all_reduce SUM")
    gang.gave_up(0)
    assert "replica 0 on /job:worker/task:0 gave up all_reduce SUM" in str(gang.error)
    assert world.stopped == [1]
    gang.gave_up(0)
    assert world.stopped == [1]
    _, gang = gang_of(2)
    gang.gave_up(0)
    assert "gave up a collective" in str(gang.error)


def test_what_is_merged_is_stopped_when_a_replica_is_lost_and_waited_for():
    world, gang = gang_of(2)
    world.arrive(0, "merge_call")
    world.arrive(1, "merge_call")
    gang.failed(1, WorkerLost("/job:worker/task:1"))
    assert world.merging_stopped == [True]
    gang.failed(0, ValueError())
    assert not gang.has_ended
    assert not gang.merged(0)
    assert gang.has_ended


# --- in the queue; see also test_gang_machine ------------------------------------------------


class Cluster:
    """A queue with workers; what it sends is noted."""

    def __init__(self, *workers: str) -> None:
        self.queue = ClosureQueue()
        for worker in workers:
            self.queue.worker_joined(worker)
        self.sent: list[tuple[str, int]] = []
        self.settled: list[Closure] = []
        self.cancels: list[Cancel] = []

    def perform(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Dispatch(worker, closures):
                    self.sent += [(worker, closure.id) for closure in closures]
                case Settle(closures):
                    self.settled += closures
                case Cancel():
                    self.cancels.append(action)

    def schedule(self, *dependencies: Closure) -> Closure:
        closure = Closure(self.queue.next_id, dependencies=dependencies)
        self.perform(self.queue.schedule(closure))
        self.perform(self.queue.dispatch())
        return closure

    def finish(self, worker: str, closure_id: int) -> None:
        self.perform(self.queue.finished(worker, [closure_id], 0.0))

    def begin(self, *workers: str) -> list[Replica]:
        first = self.queue.next_id
        replicas = [Replica(first + i, name="fn") for i in range(len(workers))]
        self.perform(self.queue.begin_gang(list(zip(workers, replicas, strict=True))))
        return replicas


def test_what_waited_for_a_gang_that_will_never_be_waits_for_the_one_before():
    cluster = Cluster("a")
    queue = cluster.queue
    first, second = queue.add_barrier(), queue.add_barrier()
    after = cluster.schedule()
    cluster.perform(queue.open_barrier(second))
    assert after.state is State.WAITING
    cluster.perform(queue.open_barrier(first))
    assert after.state is State.HELD


@pytest.mark.parametrize("how", ["failed", "end of data", "cancelled", "lost", "lost when asked"])
def test_how_a_replica_ends_is_no_error_of_the_queue_and_it_never_runs_again(how):
    cluster = Cluster("a", "b")
    queue = cluster.queue
    barrier = queue.add_barrier()
    replicas = cluster.begin("a", "b")
    error: Exception = ValueError("boom")
    if how in ("cancelled", "lost when asked"):
        cluster.perform(queue.cancel(replicas[0].id))
        assert cluster.cancels == [Cancel("a", (replicas[0].id,))]
    if how == "failed":
        cluster.perform(queue.failed("a", replicas[0].id, error))
    elif how == "end of data":
        cluster.perform(queue.end_of_data("a", replicas[0].id, error))
    elif how == "cancelled":
        cluster.perform(queue.cancelled("a", replicas[0].id))
    else:
        cluster.perform(queue.worker_lost("a"))
    assert cluster.settled == [replicas[0]]
    assert replicas[0].is_final
    if how.startswith("lost"):
        assert isinstance(replicas[0].error, WorkerLost)
    elif how == "cancelled":
        assert isinstance(replicas[0].error, ClosureCancelled)
    else:
        assert replicas[0].error is error
    assert replicas[1].state is State.HELD
    assert not queue.pending_errors
    cluster.finish("b", replicas[1].id)
    cluster.perform(queue.open_barrier(barrier))
    assert queue.collect_error() is None
    assert queue.dispatcher.num_queued == 0


def test_a_replica_is_not_given_back():
    cluster = Cluster("a")
    cluster.queue.add_barrier()
    (replica,) = cluster.begin("a")
    with pytest.raises(RemoteProtocolError, match="which it has to run"):
        cluster.queue.given_back("a", [replica.id])
    assert replica.state is State.HELD


def test_who_waits_in_a_collective_is_not_reported_as_one_that_may_push():
    cluster = Cluster("a", "b")
    reports = ScheduleReports(["a", "b"], cluster.queue)
    reports.worker_joined("a", 1)
    reports.worker_joined("b", 1)
    cluster.queue.add_barrier()
    replicas = cluster.begin("a", "b")
    cluster.schedule()
    replicas[0].in_collective = True
    state = reports.decide(0.0)
    assert state is not None
    assert not state.queued
    assert state.in_flight == [(replicas[1].id, "b")]


# --- in every order --------------------------------------------------------------------------


class GangMachine(RuleBasedStateMachine):
    """Replicas that do what they like; whoever is left waiting waits for somebody who acts."""

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.world, self.gang = gang_of(count)
        self.waits: dict[int, int] = {}  # replica → the number that it waits in
        self.number = [0] * count
        self.merging: set[int] = set()
        self.left = set(range(count))
        self.failed = False

    def look(self) -> None:
        for replica, _ in self.world.refused:
            self.waits.pop(replica, None)
        assert self.left.issuperset(self.world.stopped)
        assert not self.waits.keys() & set(self.world.stopped)
        self.world.refused.clear()
        self.world.stopped.clear()
        self.failed = self.failed or self.gang.error is not None

    def active(self) -> list[int]:
        return sorted(self.left - self.waits.keys())

    @precondition(lambda self: self.active())
    @rule(data=st.data(), what=st.sampled_from(["a", "a", "a", "b"]))
    def come(self, data: st.DataObject, what: str) -> None:
        replica = data.draw(st.sampled_from(self.active()))
        self.waits[replica] = self.number[replica]
        self.number[replica] += 1
        if (number := self.world.arrive(replica, what)) is not None:
            assert len(self.waits) == len(self.number), "not all are there"
            self.merging.add(number)
        self.look()

    @precondition(lambda self: self.active())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.active()))
        self.left.discard(replica)
        self.gang.finished(replica)
        self.look()

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.left)))
        self.left.discard(replica)
        self.waits.pop(replica, None)
        self.gang.failed(replica, WorkerLost(f"/job:worker/task:{replica}"))
        self.look()
        assert self.gang.error is not None

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.waits)))
        self.gang.gave_up(replica)
        self.look()
        self.waits.pop(replica, None)

    @precondition(lambda self: self.merging)
    @rule()
    def merge(self) -> None:
        number = self.merging.pop()
        if self.gang.merged(number):
            assert set(self.waits.values()) == {number}
            self.waits.clear()

    @rule()
    def cancel(self) -> None:
        self.gang.cancel(ClosureCancelled("run was cancelled"))
        self.look()

    @invariant()
    def nobody_waits_for_nobody(self) -> None:
        if hasattr(self, "gang"):
            assert not self.waits or self.merging or self.active(), "all that are left wait"
            over = not self.left and not self.merging
            assert self.gang.has_ended == over
            assert all(self.gang.waits(replica) for replica in self.waits)
            if self.failed:
                assert not self.waits or not self.left


TestGangMachine = GangMachine.TestCase
TestGangMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
