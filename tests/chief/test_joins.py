"""Cut-offs, errors for all, ends of data for those concerned."""

from __future__ import annotations

import asyncio

import pytest

from local_training import at_once
from psync.closures.closure import Closure
from psync.closures.queue import ClosureQueue
from psync.coordinator import Joins, describe_waiting
from psync.errors import DeadlineExceeded, EndOfData, ParameterServerLost

WORKERS = ("w0", "w1")


def held(num_closures: int = 2) -> ClosureQueue:
    """A queue of which every closure is with a worker."""
    queue = ClosureQueue()
    for i in range(num_closures):
        queue.worker_joined(f"w{i}")
        queue.schedule(Closure(i, name="step"))
    queue.dispatch()
    return queue


class World:
    """A queue of which every closure is with a worker, and its joins."""

    def __init__(self, num_closures: int = 2) -> None:
        self.queue = held(num_closures)
        self.joins = Joins(self.queue, self.waits_for)

    async def waits_for(self) -> str:
        return "closure 0 on w0"

    def tell(self, _actions) -> None:
        self.joins.settle()


@pytest.mark.promise("schedule.join-waits-for-all")
@pytest.mark.usefixtures("turns")
def test_a_join_ends_when_all_below_its_cutoff_are_final():
    world = World()
    first, both = world.joins.add(1), world.joins.add(2)
    world.joins.settle()
    assert len(world.joins.waiting) == 2
    world.tell(world.queue.finished("w0", [0], 0.0))
    assert first.done()
    assert not both.done()
    world.tell(world.queue.finished("w1", [1], 0.0))
    assert both.result() is None
    assert len(world.joins.waiting) == 0


@pytest.mark.usefixtures("turns")
def test_an_error_ends_all_joins_once_nothing_runs():
    world = World()
    joins = [world.joins.add(1), world.joins.add(2)]
    error = ValueError("first")
    world.tell(world.queue.failed("w0", 0, error))
    assert not any(join.done() for join in joins)
    world.tell(world.queue.failed("w1", 1, KeyError("second")))
    for join in joins:
        with pytest.raises(ValueError, match="first") as info:
            join.result()
        assert info.value.__notes__ == ["also failed: KeyError: 'second'"]
    later = world.joins.add(2)
    world.joins.settle()
    assert later.result() is None  # raised once


@pytest.mark.timeout(10)
async def test_what_a_join_does_ends_with_an_error_that_comes_meanwhile():
    """A ps was lost for good while ps 0 was to finish a step with it: the join had no end."""
    world = World(0)
    never = asyncio.Event()
    working = asyncio.create_task(world.joins.run(never.wait(), None))
    await asyncio.sleep(0)
    world.tell(world.queue.fail(ParameterServerLost("/job:ps/task:2", "cannot be reached")))
    with pytest.raises(ParameterServerLost, match="cannot be reached"):
        await working


@pytest.mark.usefixtures("turns")
def test_errors_that_are_alike_are_one_note():
    world = World(5)
    join = world.joins.add(5)
    for closure_id, text in enumerate(["lost", "other", "lost", "lost", "other"]):
        world.tell(world.queue.failed(f"w{closure_id}", closure_id, ValueError(text)))
    assert join.exception().__notes__ == [
        "2 more failed likewise",
        "also failed (2 times): ValueError: other",
    ]


@pytest.mark.usefixtures("turns")
def test_an_end_of_data_is_for_joins_that_wait_for_its_closure():
    world = World(3)
    earlier, concerned, last = world.joins.add(1), world.joins.add(2), world.joins.add(3)
    end = EndOfData("over")
    world.tell(world.queue.end_of_data("w1", 1, end))
    assert not earlier.done()
    assert not concerned.done()
    world.tell(world.queue.finished("w0", [0], 0.0))
    assert earlier.result() is None
    assert concerned.exception() is end
    assert not last.done()
    world.tell(world.queue.finished("w2", [2], 0.0))
    assert last.exception() is end
    again = world.joins.add(3)
    world.joins.settle()
    assert again.result() is None


@pytest.mark.usefixtures("turns")
def test_whoever_has_gone_is_told_nothing():
    world = World()
    gone, cancelled = world.joins.add(1), world.joins.add(1)
    world.joins.discard(gone)
    cancelled.cancel()
    world.tell(world.queue.finished("w0", [0], 0.0))
    assert not gone.done()
    assert len(world.joins.waiting) == 0
    world.joins.discard(gone)


def test_failing_ends_all_and_an_error_that_nobody_reads_is_no_noise(turns):
    world = World()
    read, unread = world.joins.add(2), world.joins.add(2)
    world.joins.fail(ValueError("closed"))
    assert isinstance(read.exception(), ValueError)
    world.joins.discard(unread)
    del unread
    assert not turns.reports


def test_who_waits_until_the_deadline_is_told_on_whom(turns):
    world = World(1)
    join = world.joins.add(1)
    now = turns.time()
    with pytest.raises(DeadlineExceeded, match=r"within 5 s: closure 0 on w0") as info:
        at_once(world.joins.wait((now, 5.0), join))
    assert (
        info.value.hint == "scheduled closures continue; join again, or cancel their RemoteValues"
    )
    assert not join.done()
    world.tell(world.queue.finished("w0", [0], 0.0))
    at_once(world.joins.wait((now, 5.0), join))


@pytest.mark.virtual_time
async def test_a_long_wait_is_logged_unless_there_was_news(caplog):
    world = World(1)
    loop = asyncio.get_running_loop()
    join = world.joins.add(1)

    async def live() -> None:
        for _ in range(2):
            await asyncio.sleep(12)
            world.joins.heard_at = loop.time()
        await asyncio.sleep(11)
        world.tell(world.queue.finished("w0", [0], 0.0))

    living = loop.create_task(live())
    await world.joins.wait(None, join)
    await living
    assert caplog.messages == ["join waits: closure 0 on w0"] * 3  # after 10, 22 and 34 s


def test_what_is_waited_for_is_said():
    queue = ClosureQueue()
    assert "no worker is connected (waiting for w0 at a:1, w1 at b:2)" in describe_waiting(
        queue, [("w0", "a:1"), ("w1", "b:2")], []
    )
    assert "(w0 left; waiting for w1 at b:2)" in describe_waiting(
        queue, [("w1", "b:2")], [], ["w0"]
    )
    assert "(w0, w1 left; waiting for one to come)" in describe_waiting(queue, [], [], ["w0", "w1"])
    queue = held(2)
    assert describe_waiting(queue, [], ["variables are being created"]) == (
        "closure 0 (step) on w0; closure 1 (step) on w1; variables are being created"
    )
    queue.schedule(Closure(2, name="step"))
    assert describe_waiting(queue, [], []).endswith("; 1 more wait for their turn")
    queue.failed("w0", 0, ValueError("x"))
    assert describe_waiting(queue, [], []) == (
        "there is an error, raised as soon as these steps have stopped: closure 1 (step) on w1"
    )
    queue.finished("w1", [1], 0.0)
    queue.collect_error()
    assert describe_waiting(queue, [], []) == "nothing"


@pytest.mark.parametrize(("count", "more"), [(5, ""), (6, "; and 1 more"), (100, "; and 95 more")])
def test_a_description_names_a_few_of_many(count, more):
    running = "; ".join(f"closure {i} (step) on w{i}" for i in range(5)) + more
    assert describe_waiting(held(count), [], []) == running
    others = ["variables are being created"]
    assert describe_waiting(held(count), [], others) == f"{running}; {others[0]}"


@pytest.mark.usefixtures("turns")
def test_a_request_to_stop_ends_all_joins_once_nothing_runs_and_then_is_over():
    world = World()
    first = world.joins.add(1)
    world.tell(world.queue.request_stop("the loss is NaN"))
    world.tell(world.queue.finished("w0", [0], 0.0))
    assert not first.done(), "closure 1 runs, and what is scheduled now is cancelled"
    with_work = world.joins.add(1 << 62)  # of work that ends by an error alone
    world.tell(world.queue.end_of_data("w1", 1, EndOfData("no further batch")))
    assert first.result() is None
    assert not with_work.done()
    assert world.joins.stop_reason == "the loss is NaN"
    assert world.queue.requested_stop is None
    later = Closure(2, name="step")
    world.tell(world.queue.schedule(later))
    assert not later.is_final
    last = world.joins.add(3)
    world.tell(world.queue.dispatch())
    world.tell(world.queue.finished(later.worker, [2], 0.0))
    assert last.result() is None
    assert world.joins.stop_reason is None
