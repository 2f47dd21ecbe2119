"""State that there is once in a process: fresh where one is asked for, and back afterwards."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import pickle
from collections.abc import Callable, Iterator

import pytest

import psync
from psync import optimizers
from psync.api.scopes import running_scopes
from psync.net.process_state import PerProcess, fresh_process
from psync.net.task_reports import described_by, report_text
from psync.testing.simulation.drawing import drawn
from psync.testing.simulation.run import simulate


def count() -> Iterator[int]:
    return itertools.count(1)


def test_each_process_begins_with_a_value_of_its_own() -> None:
    numbers, names = PerProcess(count), PerProcess[list[str]](list)
    assert next(numbers()) == 1
    names().append("one")
    with fresh_process():
        assert (next(numbers()), names()) == (1, [])
        with fresh_process():
            assert next(numbers()) == 1
        assert next(numbers()) == 2
        names().append("another")
    assert (next(numbers()), names()) == (2, ["one"])


def test_what_was_is_back_after_an_error() -> None:
    numbers = PerProcess(count)
    before = numbers()
    with pytest.raises(ZeroDivisionError), fresh_process():
        raise ZeroDivisionError
    assert numbers() is before


def test_what_is_first_needed_within_begins_again_afterwards() -> None:
    with fresh_process():
        numbers = PerProcess(count)
        assert next(numbers()) == 1
    assert next(numbers()) == 1


def check_twice(of: Callable[[], object]) -> None:
    """A simulation leaves the process it runs in as it was, and begins as if nothing had run."""
    before = of()
    first = simulate(drawn(4, "sync"))
    assert of() == before
    again = simulate(drawn(4, "sync"))
    assert (again.oracle, again.trace_hash) == (first.oracle, first.trace_hash)
    assert of() == before


@pytest.mark.slow
def test_a_simulation_leaves_the_optimizers_of_its_process() -> None:
    sgd = optimizers.SGD(0.5)
    synchronous = psync.SyncReplicasOptimizer(optimizers.SGD(0.5), 2)
    check_twice(lambda: [pickle.loads(pickle.dumps(each)) is each for each in (sgd, synchronous)])
    assert (optimizers.SGD(0.5).origin, optimizers.SGD(0.5).number) == (sgd.origin, sgd.number + 4)


@pytest.mark.slow
def test_a_simulation_leaves_strategies_and_what_tasks_tell_of_themselves() -> None:
    def told() -> list[str]:
        lines = report_text("because").splitlines()
        return [line for line in lines if line.startswith(("me", "/job:", "coordinator"))]

    with described_by(lambda: ["me"]):
        check_twice(lambda: (told(), running_scopes()))
        assert told() == ["me"]


@pytest.mark.slow
@pytest.mark.parametrize("works", [(), ("visited",)])
def test_a_simulation_leaves_nothing_of_itself_to_be_collected(works: tuple[str, ...]) -> None:
    simulate(dataclasses.replace(drawn(4, "sync"), works=works))
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, psync.ClusterCoordinator)]
