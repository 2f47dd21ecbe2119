"""What the backup of ps 0 knows of steps, when it has to go on with them."""

from __future__ import annotations

from psync.sync.followed_steps import FollowedSteps, LastStep

from psync.sync.group import Contribution

GROUP = 9
SET = b"set"


def push(worker: int, number: int, closure: int | None = None) -> Contribution:
    replica = (f"/job:worker/task:{worker}", 5)
    return Contribution(replica, number, 0, closure, 1, SET, 3, 1.0)


def named(*pushes: Contribution) -> list[tuple[str, int, int, float]]:
    return [(*each.replica, each.number, each.weight) for each in pushes]


def test_what_counts_is_left_in_order_until_its_step_is_closed() -> None:
    steps: FollowedSteps[str] = FollowedSteps()
    first, second, third = push(0, 1, 10), push(1, 1, 11), push(0, 2, 12)
    for at, each in ((3, first), (3, second), (4, third)):
        steps.count(GROUP, at, each)
    assert steps.left() == {GROUP: [(3, first), (3, second), (4, third)]}
    assert (steps.calls(), steps.last) == ([], {})
    steps.close(GROUP, 3, named(first, second), "how")
    assert steps.left() == {GROUP: [(4, third)]}
    assert steps.last == {GROUP: LastStep(3, "how")}
    assert steps.calls() == [(GROUP, 10, 1, SET), (GROUP, 11, 1, SET)]


def test_a_push_of_which_the_log_tells_twice_counts_once() -> None:
    """With what a snapshot is completed with, and as an entry, if it came in between."""
    steps: FollowedSteps[str] = FollowedSteps()
    for _ in range(2):
        steps.count(GROUP, 3, push(0, 1, 10))
    assert steps.left() == {GROUP: [(3, push(0, 1, 10))]}
    steps.close(GROUP, 3, named(push(0, 1), push(0, 2)), "how")
    assert (steps.left(), steps.calls()) == ({}, [(GROUP, 10, 1, SET)])


def test_a_push_outside_a_closure_leaves_no_call() -> None:
    steps: FollowedSteps[str] = FollowedSteps()
    steps.count(GROUP, 0, push(0, 1))
    steps.close(GROUP, 0, named(push(0, 1)), "how")
    assert (steps.left(), steps.calls()) == ({}, [])


def test_the_newest_step_of_each_group_is_the_last_one() -> None:
    steps: FollowedSteps[str] = FollowedSteps()
    for group, step in ((1, 5), (2, 7), (1, 6)):
        steps.close(group, step, [], f"step {step}")
    assert steps.last == {1: LastStep(6, "step 6"), 2: LastStep(7, "step 7")}


def test_calls_of_final_closures_are_forgotten() -> None:
    steps: FollowedSteps[str] = FollowedSteps()
    pushes = [push(0, number, number) for number in (1, 2, 3)]
    for each in pushes:
        steps.count(GROUP, 0, each)
    steps.close(GROUP, 0, named(*pushes), "how")
    steps.final_below(3)
    assert steps.calls() == [(GROUP, 3, 1, SET)]
