"""How many workers the work asks for: more at once, fewer after a while; and who comes or goes."""

from __future__ import annotations

import pytest

from psync.closures.dispatcher import WorkerStatistics
from psync.closures.membership import AdaptiveRule, Load, changes
from psync.closures.queue import ClosureQueue, QueueStatistics
from psync.errors import ConfigurationError


def worker(mean_s: float | None) -> WorkerStatistics:
    return WorkerStatistics("/job:worker/task:0", 1, 2, 1, mean_s)


def test_the_load_of_a_queue_has_the_mean_duration_of_its_workers() -> None:
    assert Load.of(ClosureQueue().statistics()) == Load(0, 0, None)
    workers = (worker(None), worker(1.0), worker(3.0))
    counts = QueueStatistics(9, 5, 2, 0, 0, 0, 0, 0, 0, workers)
    assert Load.of(counts) == Load(5, 2, 2.0)


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (Load(), 2),  # the minimum
        (Load(3, 2), 5),  # nothing is known of how long they take
        (Load(100, 0), 8),  # the maximum
        (Load(100, 0, 0.05), 2),  # 5 seconds of work
        (Load(100, 2, 0.25), 6),  # 25.5 seconds of work
        (Load(1, 2, 60.0), 3),  # no more than there are closures
    ],
)
def test_there_are_as_many_as_do_the_work_in_time(load: Load, wanted: int) -> None:
    assert AdaptiveRule(2, 8).wanted(load) == wanted
    assert AdaptiveRule(2, 8).decide(load, workers=2) == wanted


def test_fewer_are_wanted_only_after_several_looks_and_then_the_most_of_them() -> None:
    rule = AdaptiveRule(1, 8, wait_count=3)
    looks = [(2, 6), (4, 6), (3, 6), (3, 4), (1, 4), (1, 4), (1, 3)]
    targets = [rule.decide(Load(queued), workers) for queued, workers in looks]
    assert targets == [6, 6, 4, 4, 4, 3, 3]


def test_one_look_that_needs_them_all_begins_the_wait_anew() -> None:
    rule = AdaptiveRule(1, 8, wait_count=2)
    assert [rule.decide(Load(n), 4) for n in (1, 4, 1, 6, 1, 2)] == [4, 4, 4, 6, 4, 2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"minimum": 0, "maximum": 2}, "minimum: expected a whole number above 0, got 0"),
        ({"minimum": 1.5, "maximum": 2}, "minimum: expected a whole number above 0, got 1.5"),
        ({"minimum": 3, "maximum": 2}, "maximum: expected a whole number, 3 or above, got 2"),
        ({"minimum": 1, "maximum": 2, "wait_count": 0}, "wait_count: expected a whole number abo"),
        ({"minimum": 1, "maximum": 2, "target_s": 0}, "target_duration: expected seconds above 0"),
    ],
)
def test_a_rule_that_makes_no_sense_is_an_error(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        AdaptiveRule(**arguments)


@pytest.mark.parametrize(
    ("present", "taken", "number", "come", "leave"),
    [
        ([0, 1], [], 4, [2, 3], []),
        ([0, 1, 2, 3], [], 1, [], [3, 2, 1]),
        ([0, 2], [], 3, [1], []),  # one was given up
        ([0, 1], [2], 4, [3, 4], []),  # one is about to leave
        ([0, 1], [], 2, [], []),
    ],
)
def test_the_lowest_come_and_the_highest_leave(
    present: list[int], taken: list[int], number: int, come: list[int], leave: list[int]
) -> None:
    assert changes(present, taken, number) == (come, leave)


@pytest.mark.parametrize("number", [0, -1, True, "2"])
def test_there_is_at_least_one_worker(number: int) -> None:
    with pytest.raises(ConfigurationError, match="workers: expected a whole number above 0, got"):
        changes([0], [], number)
