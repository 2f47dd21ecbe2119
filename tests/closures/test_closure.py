"""Every move of a closure, legal and illegal, and how it shows itself in messages."""

from __future__ import annotations

import pytest

from psync.closures.closure import MOVES, Closure, Identity, State, move
from psync.closures.queue import ClosureQueue, root_of
from psync.errors import (
    ClosureCancelled,
    ClosureInputError,
    LocalProtocolError,
)
from psync.wire.closure_numbers import MAX_RUN, first_of, numbered


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_a_state_that_does_not_follow_is_refused_and_changes_nothing(
    before: State, after: State
) -> None:
    closure = Closure(17, name="step")
    closure.state = before
    if after in MOVES[before]:
        move(closure, after)
        assert closure.state is after
        return
    with pytest.raises(LocalProtocolError) as caught:
        move(closure, after)
    said = f"closure 17 (step) cannot become {after.value}: it is {before.value}"
    assert (str(caught.value), closure.state) == (said, before)


def test_closure_shows_its_number_its_function_its_state_and_its_worker() -> None:
    closure = Closure(17)
    assert str(closure) == "closure 17"
    assert repr(closure) == "<closure 17, new>"
    closure = Closure(17, name="step")
    closure.state = State.HELD
    closure.worker = "/job:worker/task:1"
    assert str(closure) == "closure 17 (step)"
    assert repr(closure) == "<closure 17 (step), held on /job:worker/task:1>"


def ended(closure_id: int, error: BaseException) -> Closure:
    closure = Closure(closure_id, name="step")
    closure.error = error
    return closure


def failed_queue(error: BaseException) -> ClosureQueue:
    queue = ClosureQueue()
    queue.fail(error)
    return queue


def test_a_cancelled_closure_says_why_and_whether_it_is_of_use_to_schedule_it_again() -> None:
    texts = []
    queues = ClosureQueue(), failed_queue(ValueError("no")), ClosureQueue()
    queues[2].stop()
    for queue in queues:
        queue.schedule(closure := Closure(3, name="step"))
        queue.cancel(3)
        assert isinstance(closure.error, ClosureCancelled)
        texts.append((closure.error.message, closure.error.hint))
    assert texts == [
        ("closure 3 (step) was cancelled", None),
        (
            "closure 3 (step) was cancelled: no",
            "schedule it again after join has raised the error",
        ),
        ("closure 3 (step) was cancelled: the coordinator was closed", None),
    ]


def test_an_input_error_without_a_cause_is_its_own_root() -> None:
    error = ClosureInputError("its input is gone")
    assert root_of(ended(0, error)) is error


@pytest.fixture
def queue() -> ClosureQueue:
    queue = ClosureQueue()
    queue.worker_joined("w")
    return queue


def begin(queue: ClosureQueue, identity: Identity | None) -> Closure:
    """Schedule a closure, and let the worker have it, if there is no error."""
    closure = Closure(queue.next_id, identity=identity)
    queue.schedule(closure)
    queue.dispatch()
    return closure


def fail(queue: ClosureQueue, closure: Closure) -> None:
    queue.failed("w", closure.id, ValueError("no"))


def test_a_closure_without_identity_has_its_id(queue: ClosureQueue) -> None:
    begin(queue, None)
    closure = begin(queue, None)
    assert closure.number_on_ps == closure.id == 1


def test_a_shard_that_failed_comes_again_as_a_run_of_its_first_closure(queue: ClosureQueue) -> None:
    shard = Identity("shard")
    numbers = []
    for _ in range(3):
        closure = begin(queue, shard)
        numbers.append(closure.number_on_ps)
        fail(queue, closure)
        queue.collect_error()
        begin(queue, None)
        queue.finished("w", [queue.next_id - 1], 0.0)
    assert numbers == [numbered(0, run) for run in range(3)]
    assert queue.kept(100) == [(0, 3)]
    queue.finished("w", [begin(queue, shard).id], 0.0)
    assert queue.kept(100) == []


def test_what_no_worker_had_begins_anew(queue: ClosureQueue) -> None:
    first, second = Identity(1), Identity(2)
    fail(queue, begin(queue, None))
    assert begin(queue, first).is_final, "cancelled at once"
    queue.collect_error()
    held, queued = begin(queue, first), begin(queue, second)
    assert held.number_on_ps == held.id == 2
    queue.cancel(queued.id)
    assert begin(queue, second).number_on_ps == 4
    assert queue.kept(2) == []


def test_what_workers_hold_is_kept_from_an_error_on_and_that_run_is_over(
    queue: ClosureQueue,
) -> None:
    shard = Identity("shard")
    closure = begin(queue, shard)
    assert queue.kept(100) == [(0, 0)]
    assert queue.kept(0) == [], "it is not below"
    queue.fail(RuntimeError("of another"))
    assert queue.kept(100) == [(0, 1)]
    queue.finished("w", [closure.id], 0.0)  # too late
    assert queue.kept(100) == [(0, 1)]
    queue.collect_error()
    assert begin(queue, shard).number_on_ps == numbered(0, 1)
    assert queue.kept(100) == [(0, 1)]


def test_what_a_rollback_undoes_is_kept_again_and_told_to_whoever_schedules_it(
    queue: ClosureQueue,
) -> None:
    undone: list[Identity] = []
    shard = Identity("shard", undone)
    closure = begin(queue, shard)
    queue.identities.undo(shard)  # it has not ended: it runs again by itself
    queue.finished("w", [closure.id], 0.0)
    assert (queue.kept(100), undone) == ([], [])
    queue.identities.undo(shard)
    queue.identities.undo(shard)
    assert (queue.kept(100), undone) == ([(0, 1)], [shard])
    assert first_of(begin(queue, shard).number_on_ps) == 0


def test_nothing_is_kept_for_whoever_is_gone(queue: ClosureQueue) -> None:
    shard = Identity("shard")
    fail(queue, begin(queue, shard))
    queue.collect_error()
    assert queue.identities.get(0) is shard
    del shard
    assert queue.identities.get(0) is None
    assert queue.kept(100) == []


def test_after_very_many_runs_it_goes_on(queue: ClosureQueue) -> None:
    shard = Identity("shard")
    fail(queue, begin(queue, shard))
    queue.collect_error()
    shard.run = MAX_RUN
    closure = begin(queue, shard)
    assert closure.number_on_ps == numbered(0, MAX_RUN)
    assert queue.kept(100) == [(0, MAX_RUN)], "its updates count"
